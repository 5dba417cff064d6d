// <diffsieve-player data-clip="{...}">: two clips of the same length that play in step, beside each other, with a
// slider between them, or as the map of their difference; or two pictures, where `fps` is null. All text goes in as
// text, never as HTML.
(() => {
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };

  const VIEWS = [
    ["side", "Side by side"],
    ["slider", "Slider"],
    ["difference", "Difference"],
  ];
  let groups = 0;

  class DiffsievePlayer extends HTMLElement {
    connectedCallback() {
      this.gone = false;
      this.tick = this.tick.bind(this);
      // Gradio keeps the element when the next result comes: it changes the attribute and takes the children away.
      this.observer = new MutationObserver(() => this.render());
      this.observer.observe(this, { attributes: true, attributeFilter: ["data-clip"], childList: true });
      this.render();
      requestAnimationFrame(this.tick);
    }

    disconnectedCallback() {
      this.gone = true;
      this.observer.disconnect();
      this.stop();
    }

    stop() {
      for (const video of this.videos ?? []) video.pause();
    }

    render() {
      if (this.root?.parentNode === this && this.shown === this.dataset.clip) return;
      this.stop();
      this.shown = this.dataset.clip;
      this.clip = JSON.parse(this.shown);
      this.still = this.clip.fps === null;
      this.frame = 0;
      this.root = make("div", { class: "ds-player", role: "group", "aria-label": this.clip.title });
      this.build();
      this.replaceChildren(this.root);
      this.show("side");
      // Muted clips may start by themselves; where they may not, or motion is not wanted, the button is there.
      if (!this.still && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.play();
    }

    build() {
      const { left, right, difference, frames } = this.clip;
      const picture = (clip, name) =>
        make("img", { src: clip.src, "data-side": name, alt: clip.label ?? "absolute difference", draggable: "false" });
      const video = (clip, name) => this.still ? picture(clip, name) :
        make("video", { src: clip.src, muted: true, playsinline: true, preload: "auto", "data-side": name,
          "aria-label": `${clip.label ?? "absolute difference"}, video`, tabindex: "-1" });
      this.left = video(left, "left");
      this.right = video(right, "right");
      this.third = difference ? video(difference, "difference") : null;
      this.videos = this.still ? [] : [this.left, this.right, ...(this.third ? [this.third] : [])];
      for (const one of this.videos) one.muted = true;
      if (!this.still) this.left.addEventListener("ended", () => this.restart());
      this.left.addEventListener("error", () => this.fail());
      this.right.addEventListener("error", () => this.fail());

      const tag = (text, side) => make("span", { class: `ds-tag ds-tag-${side}` }, text);
      this.divider = make("div", { class: "ds-divider", "aria-hidden": "true" });
      this.leftCell = make("div", { class: "ds-cell" }, this.left, tag(left.label, "left"));
      this.rightCell = make("div", { class: "ds-cell" }, this.right, tag(right.label, "right"));
      this.thirdCell = this.third
        ? make("div", { class: "ds-cell" }, this.third, tag("absolute difference", "left"))
        : null;
      this.stage = make("div", { class: "ds-stage" }, this.leftCell, this.rightCell,
        ...(this.thirdCell ? [this.thirdCell] : []), this.divider);
      this.stage.addEventListener("pointerdown", (event) => this.drag(event));
      this.stage.addEventListener("pointermove", (event) => event.buttons && this.drag(event));

      const name = `ds-view-${groups++}`;
      const views = VIEWS.filter(([view]) => view !== "difference" || difference);
      this.choices = make("div", { class: "ds-views", role: "radiogroup", "aria-label": "View" },
        ...views.map(([view, text]) => {
          const input = make("input", { type: "radio", name, value: view });
          input.checked = view === "side";
          input.addEventListener("change", () => this.show(view));
          return make("label", {}, input, make("span", {}, text));
        }));

      this.button = make("button", { type: "button", class: "ds-play" });
      this.button.addEventListener("click", () => (this.left.paused ? this.play() : this.pause()));
      this.back = make("button", { type: "button", "aria-label": "One frame back" }, "‹");
      this.back.addEventListener("click", () => this.step(-1));
      this.forth = make("button", { type: "button", "aria-label": "One frame forward" }, "›");
      this.forth.addEventListener("click", () => this.step(1));
      this.scrub = make("input", { type: "range", min: 0, max: frames - 1, step: 1, value: 0, "aria-label": "Frame" });
      this.scrub.addEventListener("input", () => this.seek(Number(this.scrub.value)));
      this.speed = make("select", { "aria-label": "Speed" },
        ...[0.25, 0.5, 1].map((value) => make("option", { value, selected: value === 1 }, `${value}x`)));
      this.speed.addEventListener("change", () => this.setSpeed());
      this.readout = make("output", { class: "ds-readout" });
      this.position = make("input", { type: "range", min: 0, max: 100, step: 1, value: 50,
        "aria-label": "Position of the divider, per cent" });
      this.position.addEventListener("input", () => this.divide());
      this.positionRow = make("label", { class: "ds-position" }, make("span", {}, "Divider"), this.position);
      this.legend = make("div", { class: "ds-legend" }, make("span", {}, "0"), make("i"),
        make("span", {}, difference ? `${difference.end} and more` : ""),
        make("small", {}, "mean absolute difference of R, G and B, values 0 to 1"));
      const transport = [this.button, this.back, this.scrub, this.forth, this.readout, this.speed];
      this.root.append(
        this.choices,
        this.stage,
        ...(this.still ? [] : [make("div", { class: "ds-transport" }, ...transport)]),
        this.positionRow,
        this.legend,
      );
      this.divide();
      if (!this.still) this.draw();
    }

    show(view) {
      this.view = view;
      this.stage.dataset.view = view;
      this.positionRow.hidden = view !== "slider";
      this.legend.hidden = view !== "difference";
      this.leftCell.hidden = this.rightCell.hidden = view === "difference";
      if (this.thirdCell) this.thirdCell.hidden = view !== "difference";
      this.divider.hidden = view !== "slider";
    }

    drag(event) {
      if (this.view !== "slider") return;
      const box = this.stage.getBoundingClientRect();
      this.position.value = Math.round((100 * (event.clientX - box.left)) / box.width);
      this.divide();
    }

    divide() {
      this.root.style.setProperty("--ds-divide", `${this.position.value}%`);
    }

    play() {
      this.videos.forEach((video) => video.play().catch(() => this.draw()));
      this.draw();
    }

    pause() {
      this.videos.forEach((video) => video.pause());
      this.seek(this.frame);
    }

    restart() {
      for (const video of this.videos) video.currentTime = 0;
      this.play();
    }

    setSpeed() {
      for (const video of this.videos) video.playbackRate = Number(this.speed.value);
    }

    step(by) {
      if (!this.left.paused) this.pause();
      this.seek((this.frame + by + this.clip.frames) % this.clip.frames);
    }

    seek(frame) {
      this.frame = frame;
      // The middle of a frame: its edges round to either side.
      for (const video of this.videos) video.currentTime = (frame + 0.5) / this.clip.fps;
      this.draw();
    }

    // Runs once for every frame of the screen: the left clip leads, the others follow.
    tick() {
      if (this.gone) return;
      if (!this.still && !this.left.paused) {
        const time = this.left.currentTime;
        for (const video of this.videos.slice(1)) {
          if (Math.abs(video.currentTime - time) > 0.6 / this.clip.fps && !video.seeking) video.currentTime = time;
          if (video.paused && !this.left.ended) video.play().catch(() => {});
        }
        const frame = Math.min(this.clip.frames - 1, Math.floor(time * this.clip.fps + 1e-3));
        if (frame !== this.frame) {
          this.frame = frame;
          this.draw();
        }
      }
      if (!this.still && this.wasPaused !== this.left.paused) {
        this.wasPaused = this.left.paused;
        this.draw();
      }
      requestAnimationFrame(this.tick);
    }

    draw() {
      const paused = this.left.paused;
      this.button.textContent = paused ? "Play" : "Pause";
      this.scrub.value = this.frame;
      const value = this.clip.psnr[this.frame];
      const psnr = value === undefined ? "" : value === null ? " · identical" : ` · ${value.toFixed(1)} dB`;
      this.readout.textContent = `frame ${this.frame + 1} / ${this.clip.frames}${psnr}`;
    }

    fail() {
      if (this.root.querySelector(".ds-note")) return;
      this.root.append(make("p", { class: "ds-note", role: "alert" }, "These files are not on the server any more: run it again."));
    }
  }

  if (!customElements.get("diffsieve-player")) customElements.define("diffsieve-player", DiffsievePlayer);
})();
