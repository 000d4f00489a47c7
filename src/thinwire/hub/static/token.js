// Asks for the bearer token where the hub wants one.

import { byId, setText } from "./dom.js";
import { readToken, writeToken } from "./settings.js";

export class TokenPrompt {
  constructor() {
    this.dialog = byId("token");
    this.answer = null;
    this.waiting = null;
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const token = byId("token-text").value.trim();
      if (!token) return;
      writeToken(token);
      byId("token-text").value = "";
      this.dialog.close();
      this.answer?.();
    });
    // Without a token there is nothing to see: Escape does not close it.
    this.dialog.addEventListener("cancel", (event) => event.preventDefault());
  }

  /** Resolves once there is another token than the hub refused. */
  ask(isWrong) {
    setText(byId("token-wrong"), isWrong ? "The hub does not take this token, or not for reading." : "");
    // A request that was on its way when another asked already shares its answer.
    this.waiting ??= new Promise((resolve) => {
      this.answer = () => {
        this.waiting = null;
        resolve();
      };
    });
    if (!this.dialog.open) this.dialog.showModal();
    byId("token-text").focus();
    return this.waiting;
  }

  hasToken() {
    return readToken() !== "";
  }
}
