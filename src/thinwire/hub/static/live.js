// Keeps the page's line to the hub: asks for a token, waits longer after each failure, goes on.

import { Away, Denied, Refused } from "./hub.js";

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30_000;

/** How long to wait before try number `attempt` (from 1): doubling, up to a third less by chance. */
export function waitBefore(attempt, random) {
  const full = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (attempt - 1));
  return full * (1 - random / 3);
}

export class Live {
  /**
   * `session(signal, onOpen)` reads from the hub until it throws, and calls `onOpen` once it is
   * through; `askToken(isWrong)` resolves once there is another token; `onState` is told
   * {name: "connecting" | "live" | "away" | "refused", next_ms, error}.
   */
  constructor({ session, askToken, hasToken, onState }) {
    this.session = session;
    this.askToken = askToken;
    this.hasToken = hasToken;
    this.onState = onState;
    this.stop = () => {};
    this.wake = () => {};
  }

  /** Begins again at once, with the stream and token of now. */
  restart() {
    this.stop();
    const control = new AbortController();
    this.stop = () => control.abort();
    this.#run(control.signal);
  }

  /** Ends a wait before it is over. */
  tryNow() {
    this.wake();
  }

  async #run(signal) {
    let attempt = 0;
    this.onState({ name: "connecting" });
    while (!signal.aborted) {
      try {
        await this.session(signal, () => {
          attempt = 0;
          if (!signal.aborted) this.onState({ name: "live" });
        });
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Denied) {
          this.onState({ name: "connecting" });
          await this.askToken(this.hasToken());
          continue;
        }
        // What is neither is a fault of this page: said, not hidden.
        if (!(error instanceof Away || error instanceof Refused)) console.error(error);
        attempt += 1;
        const wait_ms = waitBefore(attempt, Math.random());
        const name = error instanceof Refused ? "refused" : "away";
        this.onState({ name, next_ms: Date.now() + wait_ms, error });
        await this.#pause(wait_ms, signal);
      }
    }
  }

  #pause(wait_ms, signal) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, wait_ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
      signal.addEventListener("abort", this.wake, { once: true });
    });
  }
}
