//! The three number literals that Python's `json` writes and JSON does not have.
//!
//! `json.dump` writes `NaN`, `Infinity` and `-Infinity` for the floats of these names, and
//! `json.load` reads them, so a `config.json` may have them in fields that a pack does not need.
//! [`quoted`] makes a string of each, which a JSON parser accepts and an error can show. Only a
//! whole value in an array or of a key is one: not text inside of a string, not a key, and nothing
//! that Python refuses too (`-NaN`, `nan`, `+Infinity`).
//!
//! Memory: the text once more where it has such a literal, with two bytes for each.

use std::borrow::Cow;

const LITERALS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];

/// Where in a document the scan is.
enum Container {
    Object,
    Array,
}

/// `text` with each of the literals in quotes; as it is where there are none.
pub(super) fn quoted(text: &[u8]) -> Cow<'_, [u8]> {
    let found = literals(text);
    if found.is_empty() {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len() + 2 * found.len());
    let mut copied = 0;
    for (start, end) in found {
        out.extend_from_slice(&text[copied..start]);
        out.push(b'"');
        out.extend_from_slice(&text[start..end]);
        out.push(b'"');
        copied = end;
    }
    out.extend_from_slice(&text[copied..]);
    Cow::Owned(out)
}

/// The places of the literals. What is no JSON document otherwise is left for its parser to refuse.
fn literals(text: &[u8]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut open: Vec<Container> = Vec::new();
    // The last byte that is neither white space nor part of a string.
    let mut before = 0;
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        at += 1;
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => continue,
            b'"' => at = string_end(text, at),
            b'{' => open.push(Container::Object),
            b'[' => open.push(Container::Array),
            b'}' | b']' => drop(open.pop()),
            b'N' | b'I' | b'-' if is_value_place(open.last(), before) => {
                let start = at - 1;
                if let Some(end) = literal_end(text, start) {
                    found.push((start, end));
                    at = end;
                }
            }
            _ => {}
        }
        before = byte;
    }
    found
}

/// Whether a value may begin behind `before`, the last byte that counts.
fn is_value_place(container: Option<&Container>, before: u8) -> bool {
    match container {
        Some(Container::Object) => before == b':',
        Some(Container::Array) => matches!(before, b'[' | b','),
        None => false,
    }
}

fn literal_end(text: &[u8], start: usize) -> Option<usize> {
    let rest = &text[start..];
    let literal = LITERALS.into_iter().find(|literal| rest.starts_with(literal))?;
    let next = rest.get(literal.len());
    let ends = next.is_none_or(|byte| b" \t\n\r,]}".contains(byte));
    ends.then_some(start + literal.len())
}

/// The first byte after the string whose first byte is at `at`.
fn string_end(text: &[u8], mut at: usize) -> usize {
    while let Some(&byte) = text.get(at) {
        at += if byte == b'\\' { 2 } else { 1 };
        if byte == b'"' {
            break;
        }
    }
    at.min(text.len())
}

/// For the fuzz target of this module; not for use.
#[doc(hidden)]
#[must_use]
pub fn quoted_for_fuzzing(text: &[u8]) -> Vec<u8> {
    quoted(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<serde_json::Value> {
        serde_json::from_slice(&quoted(text.as_bytes())).ok()
    }

    #[test]
    fn the_literals_that_python_writes_are_read_wherever_a_value_stands() {
        for (text, same) in [
            (r#"{"a": Infinity}"#, r#"{"a": "Infinity"}"#),
            (r#"{"a":NaN,"b":-Infinity}"#, r#"{"a": "NaN", "b": "-Infinity"}"#),
            ("{\"a\": [0.0,\n Infinity\n]}", r#"{"a": [0.0, "Infinity"]}"#),
            (r#"{"a": {"b": [[NaN , -Infinity]]}}"#, r#"{"a": {"b": [["NaN", "-Infinity"]]}}"#),
            (r#"[NaN]"#, r#"["NaN"]"#),
            (r#"{"\"a\\": NaN}"#, r#"{"\"a\\": "NaN"}"#),
        ] {
            assert_eq!(read(text), Some(serde_json::from_str(same).unwrap()), "{text}");
        }
    }

    #[test]
    fn what_stands_in_strings_stays_and_what_python_refuses_is_refused() {
        let strings = r#"{"NaN": "x: Infinity, [NaN]", "-Infinity": "\", NaN"}"#;
        assert!(matches!(quoted(strings.as_bytes()), Cow::Borrowed(_)));
        for text in [
            r#"{"a": -NaN}"#,
            r#"{"a": +Infinity}"#,
            r#"{"a": nan}"#,
            r#"{"a": NaNs}"#,
            r#"{"a": Infinity2}"#,
            r#"{"a": NaN NaN}"#,
            r#"{"a": 1NaN}"#,
            r#"{NaN: 1}"#,
            r#"{"b": 1, NaN: 1}"#,
            r#"{"a" NaN}"#,
            r#"[1 NaN]"#,
            "NaN",
            r#"{"a": NaN"#,
            r#"{"a": NaN]"#,
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
