"""SGLang, through the routes that every server of it has; nothing is installed in the server.

An update is a full reload from the follower's folder: SGLang has no route that takes changes. What
the routes do was read in SGLang's source (docs/guides/sglang.md says where); this has not yet run
against a real server.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from thinwire.checkpoint.folder import Checkpoint
from thinwire.engines.engine import EngineState, Policy, Timer, Update
from thinwire.engines.http import EngineHttp
from thinwire.engines.sglang_routes import SGLangRoutes
from thinwire.engines.sglang_weights import compare_shown
from thinwire.errors import EngineError, InvalidArgument, ThinwireError

# What a server reports between the beginning and the end of a load: whoever finds it, another
# process of ours above all, knows that its weights may be anything.
_NOT_KNOWN = "thinwire-not-known"
_RETRY_S = 0.05
_SETTLE_S = 10.0
_RETRACTED_S = 0.5
_RELEASE_S = 5.0


class SGLang:
    """An SGLang server, walked from version to version by reloads from the follower's folder.

    Not safe for threads: one driver walks it.

    Args:
        endpoint: Where it listens.
        admin_key: Its ``--admin-api-key``, if it has one.
        api_key: Its ``--api-key``, if it has one. A server with both wants both.
        engine_folder: Where the server sees the follower's folder, if not at the same path: in
            another container, say. All hosts of one server need it at that path.
        ca_file: Certificates that an https endpoint's is checked against; None: the system's.

    Raises:
        InvalidArgument: The endpoint or the key is not one.
    """

    name = "sglang"

    def __init__(
        self,
        endpoint: str = "http://127.0.0.1:30000",
        admin_key: str | None = None,
        *,
        api_key: str | None = None,
        engine_folder: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        # SGLang's three levels: where there is an admin key, control routes take that one only,
        # and the others take the other one.
        self._routes = SGLangRoutes(
            *(
                EngineHttp(
                    endpoint,
                    key=key,
                    key_hint="Give the server's --admin-api-key, its --api-key, or both",
                    ca_file=ca_file,
                )
                for key in (admin_key or api_key, api_key or admin_key)
            )
        )
        self._engine_folder = engine_folder
        self._is_paused = False
        self._is_doubted = False
        self._are_caches_empty = False

    def __repr__(self) -> str:
        return f"SGLang({self._routes.endpoint!r})"

    def close(self) -> None:
        """Close what is open towards the server."""
        self._routes.close()

    def state(self, timer: Timer) -> EngineState:
        """Ask the server what it is and what it serves.

        SGLang's routes do not say whether it is paused: ``is_paused`` is what this object did, or
        that a load was begun and not ended.

        Raises:
            EngineError: It cannot be reached, or is one that cannot be updated.
        """
        identity = self._routes.identity(timer)
        label = self._routes.label(timer)
        return EngineState(identity, label, self._is_paused or label == _NOT_KNOWN)

    def attach(self, update: Update, timer: Timer) -> None:
        """Load the folder into a paused server of which nothing is known, and prove it.

        Raises:
            EngineError: It did not get there; its weights may be anything.
        """
        self._load(update, timer)
        if self.prove(update, timer) is False:
            raise EngineError(
                f"{self._routes.endpoint} loaded {update.label}, it says, and shows other weights",
                hint="Look whether it reads the same folder, and into its log",
            )

    def meet(self, update: Update, timer: Timer) -> None:
        """As :meth:`stage`: all of it is loaded in any case."""
        self.stage(update, timer)

    def stage(self, update: Update, timer: Timer) -> None:
        """Look whether the folder can be loaded, as far as that shows from here.

        Whether the server can read it at its path shows only when it loads it.

        Raises:
            EngineError: The server is one that cannot be updated.
            ThinwireError: The folder is no checkpoint.
        """
        files = Checkpoint.open(update.folder, ignore_subfolders=True).files
        if "config.json" not in files:
            raise InvalidArgument(
                f"{update.folder} has no config.json, so SGLang cannot load it",
                hint="Publish the stream from a whole Hugging Face folder",
            )
        self._routes.server_info(timer)

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that no SGLang can carry out, before anything is asked of one.

        Raises:
            InvalidArgument: It is one.
        """
        if policy.pause == "wait" and policy.cache == "keep":
            raise InvalidArgument(
                "SGLang shows that no request runs only by emptying its cache, so the pause mode "
                "wait and the cache policy keep do not go together",
                hint="Give the cache policy reset or new-sessions, or the pause mode keep or abort",
            )

    def pause(self, policy: Policy, timer: Timer) -> None:
        """Hold requests back; returns when nothing runs.

        Caches that are to be emptied are emptied here: a paused server computes nothing, so they
        stay empty until it resumes, and a server that cannot empty them is found before its
        weights are touched. A pause that fails lets requests run again, if they ran before.

        Where a load failed before, requests that it held are ended, unless the policy keeps them
        and their caches: a paused server can neither finish them nor empty the caches they use.

        Raises:
            InvalidArgument: SGLang has no way to do what the policy asks.
            EngineError: The caches could not be emptied, or the server cannot be reached.
            Deadline: The server was not without requests for one moment in the time given.
        """
        self.check_policy(policy)
        if policy.cache != "keep":
            self._refuse_outer_cache(timer)
        label = self._routes.label(timer)
        is_serving = not self._is_paused and not self._is_doubted and label != _NOT_KNOWN
        self._are_caches_empty = False
        self._is_paused = True
        try:
            if not is_serving and (policy.pause != "keep" or policy.cache != "keep"):
                self._end_held(policy, timer)
            elif policy.pause == "keep":
                self._freeze(policy, timer)
            elif policy.pause == "abort":
                self._abort(policy, timer)
            else:
                self._drain(timer)
        except ThinwireError:
            if is_serving:
                with suppress(ThinwireError):
                    self.resume(Timer(_RELEASE_S, "letting requests run again"))
            raise

    def apply(self, update: Update, timer: Timer) -> None:
        """Load the folder.

        Raises:
            EngineError: It did not; all, some or none of the weights are changed.
        """
        self._load(update, timer)

    def undo(self, update: Update, timer: Timer) -> bool:
        """Nothing can be taken back: the folder is at the new version, and so may the server be.

        SGLang's own "rolling back to original weights" reads the folder of the *failed* load.

        Returns:
            False: attach the server again.
        """
        return False

    def empty_caches(self, policy: Policy, timer: Timer) -> None:
        """Empty the prefix and KV cache, if :meth:`pause` did not.

        Raises:
            EngineError: The server would not.
        """
        if policy.cache == "keep" or self._are_caches_empty:
            return
        self._empty(timer, _SETTLE_S)

    def set_label(self, label: str, timer: Timer) -> None:
        """Have the server report ``label`` as its weight version.

        Raises:
            EngineError: It would not.
        """
        self._routes.set_label(label, timer)

    def resume(self, timer: Timer) -> None:
        """Let requests run again.

        Raises:
            EngineError: The server cannot be reached.
        """
        self._routes.resume(timer)
        self._is_paused = False
        self._are_caches_empty = False

    def prove(self, update: Update, timer: Timer) -> bool | None:
        """Compare the first row of some tensors with the folder's, and the label.

        Returns:
            False where one differs. Otherwise None: what a server shows is a small part, in which
            two versions may well be equal; for quantised models, and for those whose SGLang class
            cannot show them, it is nothing.
        """
        if self._compare(update, timer) is False:
            self._is_doubted = True
            return False
        return None

    def _compare(self, update: Update, timer: Timer) -> bool | None:
        if self._routes.label(timer) != update.label:
            return False
        if self._routes.server_info(timer).get("quantization") is not None:
            return None

        checkpoint = Checkpoint.open(update.folder, ignore_subfolders=True)
        return compare_shown(checkpoint.tensors, partial(self._routes.show, timer=timer))

    def _load(self, update: Update, timer: Timer) -> None:
        # A load that was given up may still run; its result would be taken for the next one's.
        self._routes.server_info(timer)
        self._routes.set_label(_NOT_KNOWN, timer)
        folder = self._engine_folder or str(update.folder.absolute())
        self._routes.load(folder, update.label, timer)
        self._is_doubted = False

    def _freeze(self, policy: Policy, timer: Timer) -> None:
        if policy.cache == "keep":
            self._routes.pause("in_place", timer)
            self._routes.server_info(timer)
            return
        self._routes.pause("retract", timer)
        try:
            self._empty(timer, _RETRACTED_S)
        except EngineError as error:
            raise EngineError(
                f"{self._routes.endpoint} does not empty its cache while requests wait to go on: "
                f"{error.message}",
                hint="Give the pause mode abort or wait, the cache policy keep, or an SGLang that "
                "has https://github.com/sgl-project/sglang/issues/33783 mended",
                **error.context,
            ) from error

    def _abort(self, policy: Policy, timer: Timer) -> None:
        # Somebody may have left it paused with requests at work. They end with their next step, so
        # that "abort" would wait for them forever, and nothing would get past it any more.
        self._routes.resume(timer)
        self._routes.pause("abort", timer)
        if policy.cache != "keep":
            self._empty(timer, _SETTLE_S)
        # "abort" holds requests back at the door only. This stops the scheduler too, so that one
        # that was just inside cannot run across the load.
        self._routes.pause("in_place", timer)
        self._routes.server_info(timer)

    def _end_held(self, policy: Policy, timer: Timer) -> None:
        """End the requests of a server that is paused already.

        "abort" alone would wait forever for those at work, which end with their next step.
        """
        self._routes.pause("retract", timer)
        self._routes.pause("abort", timer)
        if policy.cache != "keep":
            self._empty(timer, _SETTLE_S)

    def _drain(self, timer: Timer) -> None:
        """Catch a moment in which no request runs.

        SGLang has no route that stops admission and lets what runs end. A flush succeeds only
        when nothing runs or waits, so: one flush that waits for that, a pause, and another flush,
        which shows whether a request slipped in between. If so, again.
        """
        while True:
            if self._routes.flush(timer, wait_s=max(timer.left_s() - 1.0, 0.0)) is None:
                self._routes.pause("in_place", timer)
                if self._routes.flush(timer) is None:
                    self._are_caches_empty = True
                    return
                self._routes.resume(timer)
            time.sleep(min(_RETRY_S, timer.left_s()))

    def _empty(self, timer: Timer, within_s: float) -> None:
        self._routes.flush_within(timer, within_s)
        self._are_caches_empty = True

    def _refuse_outer_cache(self, timer: Timer) -> None:
        storage = self._routes.server_info(timer).get("hicache_storage_backend")
        if storage:
            raise EngineError(
                f"{self._routes.endpoint} keeps KV in {storage} (hicache_storage_backend), which "
                "/flush_cache does not empty",
                hint="Start it without that, or give the cache policy keep",
            )
