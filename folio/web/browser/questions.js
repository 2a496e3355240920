// Reads the questions of a page by the rules of the server, whose messages about mistakes have Python's words.

const TYPES = { // what a field takes; or a list of texts
  "an integer": Number.isInteger,
  "a number": Number.isFinite,
  "text": value => typeof value === "string",
  "True or False": value => typeof value === "boolean",
};

// What is asked, with defaults, and ids. A field is {takes, orNone, value: the default}, and its rules: least, above,
// most, below. findProblems(question) lists others, [name, what is wrong]. Throws an Error for a mistake.
function readQuestion(fields, asked, vocabSize, findProblems = () => []) {
  if (asked === null || typeof asked !== "object" || Array.isArray(asked)) {
    throw new Error("a question must be a JSON object");
  }
  const question = {}, problems = new Map();
  for (const [name, field] of Object.entries(fields)) {
    const value = question[name] = Object.hasOwn(asked, name) ? asked[name] : field.value;
    if (value === null && field.orNone) continue;
    checkType(name, value, field);
    const rule = brokenRule(value, field);
    if (rule) problems.set(name, rule);
  }
  for (const [name, problem] of findProblems(question)) if (!problems.has(name)) problems.set(name, problem);
  const shown = value => typeof value === "string" ? value : inPython(value);
  const lines = Array.from(problems, ([name, rule]) => `${name}=${shown(question[name])}: ${rule}`);
  if (lines.length) throw new Error(lines.join("\n"));
  if (question.model > 0) throw new Error(`model=${question.model}: it must be less than 1`);
  const {ids = []} = asked;
  if (!Array.isArray(ids) || !ids.every(id => Number.isInteger(id) && id >= 0 && id < vocabSize)) {
    throw new Error(`ids must be a list of token ids from 0 to ${grouped(vocabSize - 1)}`);
  }
  return {...question, ids};
}

function requireIds({ids}) {
  if (!ids.length) throw new Error("ids must contain at least one token");
}

function checkType(name, value, {takes, orNone}) {
  if (Array.isArray(takes) ? takes.includes(value) : TYPES[takes](value)) return;
  const options = Array.isArray(takes) ? takes.map(quoted).join(", ").replace(/, (?!.*, )/, " or ") : takes;
  throw new Error(`${name}=${inPython(value)}: it takes ${options}${orNone ? " or None" : ""}`);
}

// What a value breaks of the rules of its field, or null.
function brokenRule(value, {takes, least, above, most, orNone}) {
  if (takes === "an integer" && value >= 2 ** 63) return "it must be less than 2**63";
  if (!(value < least || value <= above || value > most)) return null;
  const bounds = Object.entries({"at least": least, above, "at most": most}).filter(([, bound]) => bound !== undefined);
  return `it must be ${bounds.map(bound => bound.join(" ")).join(" and ")}${orNone ? ", or None" : ""}`;
}

// The whole number that a text is, or NaN.
function wholeNumber(text) {
  return /^\s*[+-]?\d+\s*$/.test(text) ? Number(text) : NaN;
}

// --- values as Python writes them ------------------------------------------------------------------------------------

// A value of JSON.
function inPython(value) {
  if (typeof value === "string") return quoted(value);
  if (value === null || typeof value === "boolean") return {null: "None", true: "True", false: "False"}[value];
  if (Array.isArray(value)) return `[${value.map(inPython).join(", ")}]`;
  if (typeof value === "number") return Number.isInteger(value) ? BigInt(value).toString() : String(value);
  return `{${Object.entries(value).map(([key, item]) => `${quoted(key)}: ${inPython(item)}`).join(", ")}}`;
}

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
