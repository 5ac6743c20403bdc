// A model's text as HTML. Nothing in it runs and nothing is fetched: raw HTML stays text, links and images are inert,
// and what the sanitiser does not know is removed. Trusted Types let no other code set HTML on this page.
import DOMPurify from "../vendor/dompurify.js";
import hljs from "../vendor/highlight.js";
import { Marked } from "../vendor/marked.js";
import bash from "../vendor/languages/bash.js";
import css from "../vendor/languages/css.js";
import go from "../vendor/languages/go.js";
import javascript from "../vendor/languages/javascript.js";
import json from "../vendor/languages/json.js";
import python from "../vendor/languages/python.js";
import rust from "../vendor/languages/rust.js";
import sql from "../vendor/languages/sql.js";
import typescript from "../vendor/languages/typescript.js";
import xml from "../vendor/languages/xml.js";
import yaml from "../vendor/languages/yaml.js";

const languages = { bash, css, go, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, definition] of Object.entries(languages)) hljs.registerLanguage(name, definition);

const HIGHLIGHTED_CHARACTERS = 20000;
const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "span", "div",
    "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["class", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

const escape = (text) =>
  text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;").replaceAll("'", "&#39;");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    link({ href, tokens }) {
      const text = this.parser.parseInline(tokens);
      return `<span class="inert-link">${text}</span>${text === escape(href) ? "" : ` <span class="inert-target">(${escape(href)})</span>`}`;
    },
    image: ({ href, text }) => `<span class="inert-link">[image: ${escape(text || "without a description")}]</span> <span class="inert-target">(${escape(href.slice(0, 200))})</span>`,
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const name = (lang ?? "").trim().split(/\s/)[0].toLowerCase();
      const label = name ? `<span class="code-language">${escape(name)}</span>` : "";
      return `<div class="code">${label}<pre><code>${highlighted(text, name)}</code></pre></div>`;
    },
  },
});

function highlighted(text, name) {
  if (!hljs.getLanguage(name) || text.length > HIGHLIGHTED_CHARACTERS) return escape(text);
  return hljs.highlight(text, { language: name, ignoreIllegals: true }).value;
}

export const toHtml = (text) => DOMPurify.sanitize(marked.parse(text), ALLOWED);
