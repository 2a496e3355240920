// --- messages, as Python writes them ---------------------------------------------------------------------------------

// A whole number with a comma between thousands.
function grouped(n) {
  return n.toLocaleString("en-US");
}

const NOT_PRINTABLE = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;
const ESCAPED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"};

// A text in quotation marks.
function quoted(text) {
  const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escaped = text.replaceAll("\\", "\\\\").replaceAll(mark, `\\${mark}`).replace(NOT_PRINTABLE, c => {
    const code = c.codePointAt(0), hex = code.toString(16);
    return ESCAPED[c] ?? (code < 256 ? `\\x${hex.padStart(2, "0")}` : code < 65536 ? `\\u${hex.padStart(4, "0")}`
      : `\\U${hex.padStart(8, "0")}`);
  });
  return mark + escaped + mark;
}
