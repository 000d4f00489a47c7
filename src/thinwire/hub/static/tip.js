// One floating box for what is hovered or focused.

import { byId, make, setText } from "./dom.js";

const GAP = 10;

export class Tip {
  constructor() {
    this.box = byId("tip");
    this.title = make("strong");
    this.rows = make("dl");
    this.box.append(this.title, this.rows);
  }

  /** Shows [label, text] pairs beside a rectangle of the window. */
  show(title, rows, near) {
    setText(this.title, title);
    this.rows.replaceChildren(
      ...rows.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]),
    );
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const page = document.documentElement;
    const right = near.right + GAP + width <= page.clientWidth;
    const left = right ? near.right + GAP : Math.max(4, near.left - GAP - width);
    const below = near.top + height <= page.clientHeight;
    const top = below ? near.top : Math.max(4, near.bottom - height);
    this.box.style.left = `${left}px`;
    this.box.style.top = `${top}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
