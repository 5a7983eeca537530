/* The bits of a number, to click at: what helpers.bitview shows in a notebook, without a kernel.

   Every <div class="explorer"> of a page becomes one. FLOAT_FORMATS comes from halfbits.formats. */

"use strict";

const FIELDS = ["sign", "exponent", "fraction"];

/* The exponent of the largest power of two up to `size`, a positive number; exact, as Math.log2 is not. */
function floorLog2(size) {
  const bits = new DataView(new ArrayBuffer(8));
  bits.setFloat64(0, size);
  return ((bits.getUint32(0) >>> 20) & 2047) - 1023;
}

function roundHalfToEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}

/* A format of halfbits.formats. Codes are integers from 0 to 2 ** bits - 1, so numbers hold them and every value. */
class FloatFormat {
  constructor(facts) {
    Object.assign(this, facts);
    this.half = 2 ** (this.bits - 1); // the first code with a sign
    this.implicit = 2 ** this.mantissa_bits;
  }

  fields(code) {
    const size = code % this.half;
    return [Math.floor(code / this.half), Math.floor(size / this.implicit), size % this.implicit];
  }

  decode(code) {
    const [sign, exponent, fraction] = this.fields(code);
    const size = code % this.half;
    let value = fraction * 2 ** (1 - this.bias - this.mantissa_bits);
    if (size > this.first_special) value = NaN;
    else if (size === this.first_special) value = this.has_infinity ? Infinity : NaN;
    else if (exponent > 0) value = (1 + fraction / this.implicit) * 2 ** (exponent - this.bias);
    return sign ? -value : value;
  }

  encode(value) {
    const sign = value < 0 || Object.is(value, -0) ? this.half : 0;
    if (Number.isNaN(value)) return this.nan;
    const size = Math.min(Math.abs(value), 2 * this.max);
    const exponent = Math.max(floorLog2(size), 1 - this.bias);
    const significand = roundHalfToEven(size / 2 ** (exponent - this.mantissa_bits));
    const code = (exponent - 1 + this.bias) * this.implicit + significand;
    return sign + Math.min(code, this.past_max);
  }

  kind(code) {
    const value = this.decode(code);
    const [, exponent, fraction] = this.fields(code);
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return "infinity";
    if (exponent > 0) return "normal";
    return fraction ? "subnormal" : "zero";
  }

  /* The codes of the next number below and above, infinities included; null where there is none. */
  neighbours(code) {
    const place = code < this.half ? code : this.half - code;
    return [place - 1, place + 1].map((rank) => {
      const found = Math.abs(rank) + (rank < 0 ? this.half : 0);
      const there = Math.abs(rank) < this.half && !Number.isNaN(this.decode(code));
      return there && !Number.isNaN(this.decode(found)) ? found : null;
    });
  }

  formula(code) {
    const [sign, exponent, fraction] = this.fields(code);
    const kind = this.kind(code);
    if (kind === "NaN" || kind === "infinity") return `exponent ${exponent}, fraction ${fraction}: ${kind}`;
    const normal = kind === "normal" ? 1 : 0;
    const power = `2^(${normal ? exponent : 1} - ${this.bias})`;
    return `${sign ? "-" : ""}${power} x (${normal} + ${fraction}/${this.implicit})`;
  }

  spacing(value) {
    const exponent = Math.max(floorLog2(Math.abs(value)), 1 - this.bias);
    return 2 ** (exponent - this.mantissa_bits);
  }

  hex(code) {
    return "0x" + code.toString(16).padStart(Math.ceil(this.bits / 4), "0");
  }
}

/* A number as one types it, sign of zero included. */
function written(value) {
  return Object.is(value, -0) ? "-0" : String(value).replace("Infinity", "inf");
}

/* The same with at most `digits` digits. */
function short(value, digits) {
  const rounded = Number(value.toPrecision(digits));
  return rounded !== 0 && Math.abs(rounded) < 1e-4 ? rounded.toExponential() : written(rounded);
}

/* What was typed: {value}, {code} for 0x3c00 or 0b1, or null: 0.1, 1e-8, 2^-24, 1/3, inf, nan are numbers. */
function parse(text) {
  const plain = text.trim().toLowerCase().replaceAll("**", "^").replaceAll("−", "-");
  if (/^0(x[\da-f]+|b[01]+)$/.test(plain)) return { code: Number(plain) };
  const sign = plain.startsWith("-") ? -1 : 1;
  const size = plain.replace(/^[+-]/, "").replace(/^inf(inity)?$/, "Infinity");
  const number = (part) => (/^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|^Infinity$/.test(part) ? Number(part) : NaN);
  if (size === "nan") return { value: NaN };
  let value = number(size);
  if (size.includes("^")) {
    const [base, power] = size.split("^");
    value = number(base) ** (Math.sign(power.startsWith("-") ? -1 : 1) * number(power.replace(/^[+-]/, "")));
  } else if (/^\d+\/\d+$/.test(size)) {
    const [above, below] = size.split("/");
    value = Number(below) ? Number(above) / Number(below) : NaN;
  }
  return Number.isNaN(value) ? null : { value: sign * value };
}

function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/* The fields of a code as spans, read as "0 | 01011 | 1001100110" where styles are stripped. */
function bitSpans(format, code) {
  const bits = code.toString(2).padStart(format.bits, "0");
  const ends = [1, 1 + format.exponent_bits, format.bits];
  const spans = FIELDS.map((field, i) =>
    element("span", { className: `field ${field}`, textContent: bits.slice(ends[i - 1] ?? 0, ends[i]) }),
  );
  return spans.flatMap((span, i) => (i ? [element("span", { className: "bar", textContent: " | " }), span] : [span]));
}

/* What was lost when `given` was stored, in words; nothing where it is stored as it is. */
function lossOf(format, value, given) {
  if (Object.is(value, given)) return "";
  if (Number.isNaN(given)) return Number.isNaN(value) ? "" : `no NaN in this format: stored as ${written(value)}`;
  if (!Number.isFinite(given)) return `no inf in this format: stored as ${written(value)}`;
  if (Number.isNaN(value)) return `${written(given)} is too large, and there is no inf: NaN`;
  if (!Number.isFinite(value)) return `${written(given)} is too large: inf`;
  if (Math.abs(given) > 1.5 * format.max) return `${written(given)} is too large: stored as the largest`;
  return `${written(given)} rounded by ${short(value - given, 3)}`;
}

/* SVG of a line with ticks [[label, x], ...] and a pointer: a triangle over the line, or one beyond its end that points on. */
function axis(y, caption, ticks, pointer) {
  const marks = ticks.map(([label, x]) => {
    const place = x > 540 && label.length > 4 ? 'class="last" x="636"' : `x="${x}"`;
    return `<path d="M${x} ${y} v7"/><text ${place} y="${y + 22}">${label}</text>`;
  });
  if (pointer < 40) marks.push(`<path class="pointer" d="M26 ${y} l12 -6 v12 z"/>`);
  else if (pointer > 600) marks.push(`<path class="pointer" d="M614 ${y} l-12 -6 v12 z"/>`);
  else if (!Number.isNaN(pointer)) marks.push(`<path class="pointer" d="M${pointer} ${y - 1} l-6 -11 h12 z"/>`);
  return `<text class="caption" x="0" y="${y - 22}">${caption}</text><path d="M40 ${y} h560"/>${marks.join("")}`;
}

function numberLines(format, code, given) {
  const value = format.decode(code);
  let [drawing, y] = ["", 40];
  if (Number.isFinite(value)) {
    const codes = format.neighbours(code).filter((each) => each !== null);
    const around = codes.map((each) => format.decode(each)).filter(Number.isFinite);
    const scale = 200 / Math.max(...around.map((each) => Math.abs(each - value)));
    const onLine = (each) => 320 + scale * (each - value);
    const ticks = [value, ...around].map((each) => [short(each, 9), onLine(each)]);
    drawing = axis(y, "the number, and its neighbours in this format", ticks, onLine(given));
    y += 80;
  }
  const [low, high] = [Math.log2(format.smallest_subnormal), Math.log2(format.max)];
  const bySize = (size) => 60 + (520 * (Math.log2(size) - low)) / (high - low);
  const marks = [format.smallest_subnormal, format.smallest_normal, 1, format.max];
  const apart = [...new Set(marks)].filter((size, i) => i !== 1 || bySize(size) > 130);
  const ticks = apart.map((size) => [short(size, size > 1 ? 5 : 3), bySize(size)]);
  const size = Math.abs(given);
  const pointer = size === 0 ? 0 : size === Infinity ? 640 : bySize(size);
  drawing += axis(y, `its size in the range of ${format.name}, by powers of two`, ticks, pointer);
  return `<svg viewBox="0 0 640 ${y + 30}" aria-hidden="true">${drawing}</svg>`;
}

class BitExplorer {
  constructor(place, formats) {
    this.formats = formats;
    this.number = element("input", { type: "text", spellcheck: false, autocomplete: "off", ariaLabel: "number" });
    this.chosen = element("select", { ariaLabel: "format" });
    this.chosen.append(...Object.keys(formats).map((name) => element("option", { textContent: name })));
    this.steps = ["next below", "next above"].map((textContent) => element("button", { type: "button", textContent }));
    this.bits = element("div", { className: "bits", role: "group", ariaLabel: "bits" });
    this.problem = element("p", { className: "problem", role: "alert" });
    this.result = element("div", { className: "result", ariaLive: "polite" });
    this.place = place;
    const label = (text, input) => element("label", {}, [text, input]);
    const controls = [label("number ", this.number), label("format ", this.chosen), element("span", {}, this.steps)];
    place.replaceChildren(element("div", { className: "controls" }, controls), this.bits, this.problem, this.result);

    this.number.addEventListener("change", () => this.read(this.number.value));
    this.chosen.addEventListener("change", () => this.showValue(this.given, this.chosen.value));
    this.steps.forEach((button, side) => button.addEventListener("click", () => this.step(side)));
    this.bits.addEventListener("keydown", (event) => this.move(event));
    window.addEventListener("hashchange", () => this.followLink());
    if (!this.followLink()) this.showValue(Number(place.dataset.value ?? 0.1), place.dataset.format ?? "fp16", false);
  }

  /* Show what the page's address names, as #value=0.1&format=fp16. */
  followLink() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const format = asked.get("format") ?? "";
    if (!Object.hasOwn(this.formats, format) || !asked.has("value")) return false;
    this.format = this.formats[format];
    this.showValue(0, format, false);
    this.read(asked.get("value"));
    return true;
  }

  read(text) {
    const typed = parse(text);
    const last = 2 ** this.format.bits - 1;
    if (typed === null) {
      this.problem.textContent = `“${text}” is not a number. Try 0.1, 1e-8, 2^-24, 1/3, inf, or bits: 0x3c00.`;
    } else if (typed.code > last) {
      this.problem.textContent = `${this.format.name} codes are integers from 0 to ${this.format.hex(last)}.`;
    } else if ("code" in typed) {
      this.showCode(typed.code);
    } else {
      this.showValue(typed.value, this.format.name);
    }
  }

  step(side) {
    const code = this.format.neighbours(this.code)[side];
    if (code !== null) this.showCode(code);
  }

  showCode(code) {
    this.show(this.format, code, this.format.decode(code), true);
  }

  showValue(value, name, link = true) {
    this.show(this.formats[name], this.formats[name].encode(value), value, link);
  }

  show(format, code, given, link) {
    Object.assign(this, { format, code, given });
    const focused = [...this.bits.querySelectorAll("button")].indexOf(document.activeElement);
    this.number.value = Number.isNaN(given) ? format.hex(code) : written(given);
    this.chosen.value = format.name;
    this.problem.textContent = "";
    this.drawBits();
    if (focused >= 0) this.bits.querySelectorAll("button")[focused]?.focus();
    format.neighbours(code).forEach((found, side) => (this.steps[side].disabled = found === null));
    this.drawResult();
    if (link) {
      const asked = new URLSearchParams({ value: this.number.value, format: format.name });
      history.replaceState(null, "", `#${asked}`);
    }
  }

  drawBits() {
    let place = this.format.bits;
    const numbers = this.format.fields(this.code);
    const widths = [1, this.format.exponent_bits, this.format.mantissa_bits];
    const fields = FIELDS.map((field, i) => {
      const buttons = Array.from({ length: widths[i] }, () => this.bit(--place, field));
      const caption = element("div", { className: "caption", textContent: `${field} ${numbers[i]}` });
      return element("div", { className: field }, [caption, element("div", { className: "cells" }, buttons)]);
    });
    this.bits.replaceChildren(...fields.filter((_, i) => widths[i]));
  }

  bit(place, field) {
    const on = Math.floor(this.code / 2 ** place) % 2;
    const title = `bit ${place}, ${field}`;
    const button = element("button", { type: "button", textContent: on, title, ariaLabel: `${title}: ${on}` });
    button.classList.toggle("on", on === 1);
    button.addEventListener("click", () => this.showCode(this.code + (on ? -1 : 1) * 2 ** place));
    return button;
  }

  /* Arrow keys among the bits: to another bit, and to the next number above or below. */
  move(event) {
    const buttons = [...this.bits.querySelectorAll("button")];
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (side) buttons[buttons.indexOf(document.activeElement) + side]?.focus();
    else if (event.key === "ArrowDown") this.step(0);
    else if (event.key === "ArrowUp") this.step(1);
    else return;
    event.preventDefault();
  }

  drawResult() {
    const { format, code, given } = this;
    const value = format.decode(code);
    const facts = [format.hex(code), format.kind(code)];
    const loss = lossOf(format, value, given);
    if (loss) facts.push(loss);
    if (Number.isFinite(value)) facts.push(`spacing here ${short(format.spacing(value), 6)}`);
    const lines = element("div", { className: "lines", innerHTML: numberLines(format, code, given) });
    const shown = element("b", { className: "value", textContent: written(value) });
    const made = Number.isFinite(value) ? `${format.formula(code)} = ` : format.formula(code).replace(/:.*/, ": ");
    const formula = element("div", { className: "formula" }, [made, shown]);
    const line = element("div", { className: "facts", textContent: facts.join(" · ") });
    this.result.replaceChildren(formula, line, lines, this.everyFormat());
  }

  everyFormat() {
    const rows = Object.values(this.formats).map((format) => {
      const code = format === this.format ? this.code : format.encode(this.given);
      const lost = Number.isNaN(this.given) && !Number.isNaN(format.decode(code));
      const cells = [format.name, written(format.decode(code)), lost ? "no NaN" : format.kind(code), ""];
      const row = cells.map((textContent) => element("td", { textContent }));
      row[3].append(...bitSpans(format, code));
      return element("tr", {}, row);
    });
    const caption = element("div", { className: "caption", textContent: "the same number in every format" });
    return element("div", {}, [caption, element("table", {}, [element("tbody", {}, rows)])]);
  }
}

const FLOATS = Object.fromEntries(
  FLOAT_FORMATS.map((facts) => [facts.name, new FloatFormat(facts)]),
);
for (const place of document.querySelectorAll("div.explorer")) new BitExplorer(place, FLOATS);
