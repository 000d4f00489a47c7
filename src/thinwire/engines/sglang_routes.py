"""The routes of an SGLang server, one method for each, with what they mean for an update.

What they do was read in SGLang's source; docs/guides/sglang.md says where.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Any

from thinwire.engines.engine import Timer
from thinwire.engines.http import EngineHttp
from thinwire.errors import EngineError

# The first release whose /update_weights_from_disk was seen to take flush_cache. An older one
# flushes always, and its scheduler dies of it while requests are held.
_OLDEST = (0, 5, 9)
# What a server says of itself that is set when it starts and never after: above all its random
# seed, drawn anew at each start unless --random-seed is given.
_SET_AT_START = (
    "random_seed",
    "version",
    "host",
    "port",
    "nccl_port",
    "dist_init_addr",
    "tp_size",
    "dp_size",
    "max_total_num_tokens",
)
_RETRY_S = 0.05


class SGLangRoutes:
    """Calls of one server. Every one raises ``EngineError`` where the server refuses it.

    Args:
        control: How to reach the routes that change something.
        ordinary: How to reach the others: with another key, it may be.
    """

    def __init__(self, control: EngineHttp, ordinary: EngineHttp) -> None:
        self._http = control
        self._ordinary = ordinary
        self.endpoint = control.endpoint

    def close(self) -> None:
        """Close what is open towards the server."""
        self._http.close()
        self._ordinary.close()

    def identity(self, timer: Timer) -> str:
        """Differs for every start, unless ``--random-seed`` makes the starts alike."""
        info = self.server_info(timer)
        said = {key: info.get(key) for key in _SET_AT_START}
        text = json.dumps(said, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def label(self, timer: Timer) -> str:
        """The weight version that it reports."""
        return str(self._model_info(timer).get("weight_version", ""))

    def server_info(self, timer: Timer) -> dict[str, Any]:
        """What it says of itself.

        The scheduler has a part in the answer, and gives it after everything that it was told
        before: when this returns, a pause has been carried out and a load has ended.
        """
        info = self._get("/server_info", "/get_server_info", timer)
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info.get("version", "")))
        version = tuple(int(part) for part in found.groups()) if found else _OLDEST
        # Builds from a checkout may call themselves 0.0.0.
        if (0, 0, 0) < version < _OLDEST:
            raise EngineError(
                f"{self.endpoint} is SGLang {info['version']}",
                hint=f"SGLang {'.'.join(map(str, _OLDEST))} or newer is needed",
            )
        if int(info.get("tokenizer_worker_num") or 1) > 1:
            raise EngineError(
                f"{self.endpoint} has {info['tokenizer_worker_num']} tokenizer workers, and "
                "each of them keeps a weight version of its own",
                hint="Start it with --tokenizer-worker-num 1",
            )
        return info

    def pause(self, mode: str, timer: Timer) -> None:
        """Pause in SGLang's mode "in_place", "retract" or "abort".

        "abort" returns when every caller has its answer; the others before anything happened.
        """
        self._http.call("POST", "/pause_generation", timer=timer, json={"mode": mode})

    def resume(self, timer: Timer) -> None:
        """Let requests run."""
        self._http.call("POST", "/continue_generation", timer=timer, json={})

    def load(self, folder: str, label: str, timer: Timer) -> None:
        """Load all weights from a folder of the server's, and report ``label`` from then on.

        Caches are left as they are: the route's own flush kills the scheduler where a request is
        held.
        """
        route = "POST /update_weights_from_disk"
        answer = self._http.ask(
            "POST",
            "/update_weights_from_disk",
            timer=timer,
            json={
                "model_path": folder,
                # A server started with "dummy" would otherwise take that one, and refuse.
                "load_format": "safetensors",
                "weight_version": label,
                "flush_cache": False,
                "abort_all_requests": False,
            },
            ok=(200, 400),
        )
        self._check_success(answer.data, route)
        served = self._model_info(timer)
        if served.get("weight_version") != label or served.get("model_path") != folder:
            raise EngineError(
                f"{self.endpoint} answers {route} with success, and then says that it serves "
                f"{served.get('weight_version')!r} of {served.get('model_path')!r}",
                hint="Look whether something else updates this server",
                route=route,
            )

    def set_label(self, label: str, timer: Timer) -> None:
        """Have it report a weight version."""
        # The route ends every request unless told not to.
        body = {"new_version": label, "abort_all_requests": False}
        answer = self._http.call("POST", "/update_weight_version", timer=timer, json=body)
        self._check_success(answer, "POST /update_weight_version")

    def show(self, name: str, rows: int, timer: Timer) -> Any:
        """A tensor's first rows as nested lists; None where it shows none."""
        body = {"name": name, "truncate_size": rows}
        answer = self._http.ask(
            "POST", "/get_weights_by_name", timer=timer, json=body, ok=(200, 400, 404)
        )
        return answer.data if answer.status == 200 else None

    def flush(self, timer: Timer, *, wait_s: float = 0.0) -> str | None:
        """Empty the prefix and KV cache; it does that only while no request runs or waits.

        Args:
            timer: How long the call may take.
            wait_s: How long the server may wait for such a moment. Releases before the route had
                a timeout do not wait.

        Returns:
            Why it did not; None: it did.
        """
        answer = self._http.ask(
            "POST", "/flush_cache", timer=timer, params={"timeout": wait_s}, ok=(200, 400)
        )
        return None if answer.status == 200 else str(answer.data).strip()[:300]

    def flush_within(self, timer: Timer, within_s: float) -> None:
        """Empty the caches, trying for some time: what ended may not be cleared up yet."""
        end_s = time.monotonic() + min(within_s, timer.left_s())
        while (reason := self.flush(timer)) is not None:
            if time.monotonic() >= end_s:
                raise EngineError(
                    f"{self.endpoint} answers POST /flush_cache with 400: {reason}",
                    hint="Requests run or wait in it; look into its log",
                    route="POST /flush_cache",
                    status=400,
                )
            time.sleep(min(_RETRY_S, timer.left_s()))

    def _model_info(self, timer: Timer) -> dict[str, Any]:
        return self._get("/model_info", "/get_model_info", timer)

    def _get(self, path: str, older: str, timer: Timer) -> dict[str, Any]:
        answer = self._ordinary.ask("GET", path, timer=timer, ok=(200, 404))
        if answer.status == 404:
            answer = self._ordinary.ask("GET", older, timer=timer)
        if not isinstance(answer.data, dict):
            raise EngineError(
                f"{self.endpoint} answers GET {path} with no object",
                hint="Look whether an SGLang server listens there",
                route=f"GET {path}",
                status=answer.status,
            )
        return answer.data

    def _check_success(self, data: Any, route: str) -> None:
        """Refuse an answer that does not say success: a status of 200 does not mean it."""
        if isinstance(data, dict) and data.get("success") is True:
            return
        said = data.get("message") if isinstance(data, dict) else data
        raise EngineError(
            f"{self.endpoint} answers {route} with no success: {str(said)[:300]}",
            hint="Its weights may be anything: attach it again, and look into its log",
            route=route,
            body=str(said)[:300],
        )
