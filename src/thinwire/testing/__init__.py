"""What tests of thinwire, and of stores for thinwire, are made of; installed with the package."""

from thinwire.testing.contract import STORE_CHECKS, ContractBroken
from thinwire.testing.faults import FaultStore, Rates

__all__ = ["STORE_CHECKS", "ContractBroken", "FaultStore", "Rates"]
