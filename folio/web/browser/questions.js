// Validates questions of the page by the rules of the server, with the same error messages as in Python.

const TYPES = { // types of fields, as named in messages; a type can also be a list of strings
  "an integer": Number.isInteger,
  "a number": Number.isFinite,
  "text": value => typeof value === "string",
  "True or False": value => typeof value === "boolean",
};

// NonNegativeInt in folio/base/settings.py. Integers of other types have no limit besides their own bounds.
const INTEGER = {type: "an integer", min: 0, default: 0, isInt64: true};

// Parse a question: its fields with defaults, and ids. Throws an Error if it is invalid.
// A field is {type, optional, default, min, above, max, isInt64}. findProblems(question) yields further [name, problem].
function readQuestion(fields, body, vocabSize, findProblems = () => []) {
  if (body === null || typeof body !== "object" || Array.isArray(body)) {
    throw new Error("a question must be a JSON object");
  }
  const question = {}, problems = new Map();
  for (const [name, field] of Object.entries(fields)) {
    const value = question[name] = Object.hasOwn(body, name) ? body[name] : field.default;
    if (value === null && field.optional) continue;
    checkType(name, value, field);
    const rule = violatedRule(value, field);
    if (rule) problems.set(name, rule);
  }
  for (const [name, problem] of findProblems(question)) if (!problems.has(name)) problems.set(name, problem);
  const format = value => typeof value === "string" ? value : inPython(value);
  const lines = Array.from(problems, ([name, rule]) => `${name}=${format(question[name])}: ${rule}`);
  if (lines.length) throw new Error(lines.join("\n"));
  if (question.model > 0) throw new Error(`model=${question.model}: it must be less than 1`);
  const {ids = []} = body;
  if (!Array.isArray(ids) || !ids.every(id => Number.isInteger(id) && id >= 0 && id < vocabSize)) {
    throw new Error(`ids must be a list of token ids from 0 to ${grouped(vocabSize - 1)}`);
  }
  return {...question, ids};
}

function requireIds({ids}) {
  if (!ids.length) throw new Error("ids must contain at least one token");
}

function checkType(name, value, {type, optional}) {
  if (Array.isArray(type) ? type.includes(value) : TYPES[type](value)) return;
  const options = Array.isArray(type) ? type.map(quoted).join(", ").replace(/, (?!.*, )/, " or ") : type;
  throw new Error(`${name}=${inPython(value)}: expected ${options}${optional ? " or None" : ""}`);
}

// The rule that a value violates, or null.
function violatedRule(value, {min, above, max, isInt64, optional}) {
  if (isInt64 && value >= 2 ** 63) return "it must be less than 2**63";
  if (!(value < min || value <= above || value > max)) return null;
  const bounds = Object.entries({"at least": min, above, "at most": max}).filter(([, bound]) => bound !== undefined);
  return `it must be ${bounds.map(bound => bound.join(" ")).join(" and ")}${optional ? ", or None" : ""}`;
}

// Parse an integer; NaN if the text is not one.
function parseInteger(text) {
  return /^\s*[+-]?\d+\s*$/.test(text) ? Number(text) : NaN;
}

// --- values as Python writes them ------------------------------------------------------------------------------------

// Format a JSON value.
function inPython(value) {
  if (typeof value === "string") return quoted(value);
  if (value === null || typeof value === "boolean") return {null: "None", true: "True", false: "False"}[value];
  if (Array.isArray(value)) return `[${value.map(inPython).join(", ")}]`;
  if (typeof value === "number") return Number.isInteger(value) ? BigInt(value).toString() : String(value);
  return `{${Object.entries(value).map(([key, item]) => `${quoted(key)}: ${inPython(item)}`).join(", ")}}`;
}

// An integer with thousands separators.
function grouped(n) {
  return n.toLocaleString("en-US");
}

const NOT_PRINTABLE = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;
const ESCAPED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"};

// A string literal.
function quoted(text) {
  const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escaped = text.replaceAll("\\", "\\\\").replaceAll(mark, `\\${mark}`).replace(NOT_PRINTABLE, c => {
    const code = c.codePointAt(0), hex = code.toString(16);
    return ESCAPED[c] ?? (code < 256 ? `\\x${hex.padStart(2, "0")}` : code < 65536 ? `\\u${hex.padStart(4, "0")}`
      : `\\U${hex.padStart(8, "0")}`);
  });
  return mark + escaped + mark;
}
