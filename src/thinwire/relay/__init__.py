"""One download for many followers: what a stream's store holds, kept near and passed on over HTTP.

``upstream`` is the store and whether it answers, ``records`` and ``blocks`` what was taken from it
and proved, ``files`` the folder it is kept in, ``watch`` looks for new versions, ``needs`` gathers
the followers' leases, ``relay`` puts one stream together, and ``server`` and ``sending`` answer
requests. No byte goes out that was not proved: records by their signature and their place, data by
the digests of its blocks.
"""
