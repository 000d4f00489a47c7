// Reads again, but never two at a time, not more often than is useful, and not for a hidden page.

const SHORTEST_GAP_MS = 1000;
// Where reading takes long (many replicas, a slow line), the hub and the page rest as long.
const REST = 2;

export class Refresh {
  /** `read(signal)` reads and shows; what it throws goes to `onFailure`. */
  constructor(read, onFailure) {
    this.read = read;
    this.onFailure = onFailure;
    this.isWanted = false;
    this.isRunning = false;
    this.next_ms = 0;
    this.signal = null;
    document.addEventListener("visibilitychange", () => this.#kick());
  }

  /** Everything now, for a session that begins; throws what `read` throws. */
  async begin(signal) {
    this.signal = signal;
    this.isWanted = false;
    await this.#once(signal);
  }

  /** Again, soon. */
  want() {
    this.isWanted = true;
    this.#kick();
  }

  async #once(signal) {
    const began_ms = performance.now();
    this.isRunning = true;
    try {
      await this.read(signal);
    } finally {
      this.isRunning = false;
      const took_ms = performance.now() - began_ms;
      this.next_ms = began_ms + Math.max(SHORTEST_GAP_MS, took_ms * (1 + REST));
    }
  }

  #kick() {
    clearTimeout(this.timer);
    if (!this.isWanted || this.isRunning || document.hidden || this.signal?.aborted) return;
    this.timer = setTimeout(() => this.#go(), Math.max(0, this.next_ms - performance.now()));
  }

  async #go() {
    if (this.isRunning || this.signal.aborted) return;
    this.isWanted = false;
    try {
      await this.#once(this.signal);
    } catch (error) {
      if (!this.signal.aborted) this.onFailure(error);
    }
    this.#kick();
  }
}
