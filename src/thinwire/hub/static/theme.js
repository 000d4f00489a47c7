// Light, dark, or as the system has it. Runs before the page is drawn.

import { readTheme, writeTheme } from "./settings.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };

function show(theme) {
  document.documentElement.dataset.theme = theme;
}

show(readTheme());

/** Makes a button switch between the three. */
export function bindTheme(button) {
  const label = () => {
    button.textContent = SIGNS[readTheme()];
    button.setAttribute("aria-label", `Colours: ${readTheme()}. Switch to ${NEXT[readTheme()]}.`);
  };
  label();
  button.addEventListener("click", () => {
    writeTheme(NEXT[readTheme()]);
    show(readTheme());
    label();
  });
}
