//! YAML of JSON values: keys in their order, texts of several lines as blocks.

use std::fmt::Write;

use serde_json::Value;

/// The document of `value`.
pub(crate) fn yaml(value: &Value) -> String {
    let mut text = String::new();
    write_value(value, 0, &mut text);
    text
}

/// Writes `value` behind a key, a dash or nothing; the lines of a map or list are indented by `depth` spaces.
fn write_value(value: &Value, depth: usize, text: &mut String) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (number, (key, value)) in map.iter().enumerate() {
                if number > 0 || !text.ends_with("- ") {
                    indent(depth, text);
                }
                let _ = if is_plain(key) {
                    write!(text, "{key}:")
                } else {
                    write!(text, "{}:", Value::from(key.as_str()))
                };
                write_behind(value, depth + 2, text);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for value in list {
                indent(depth, text);
                text.push_str("- ");
                match value {
                    Value::Object(map) if !map.is_empty() => write_value(value, depth + 2, text),
                    _ => {
                        let _ = writeln!(text, "{value}");
                    }
                }
            }
        }
        scalar => {
            let _ = writeln!(text, "{scalar}");
        }
    }
}

fn write_behind(value: &Value, depth: usize, text: &mut String) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            text.push('\n');
            write_value(value, depth, text);
        }
        Value::Array(list) if !list.is_empty() => {
            text.push('\n');
            write_value(value, depth, text);
        }
        Value::String(block) if is_block(block) => {
            text.push_str(" |\n");
            for line in block.lines() {
                indent(if line.is_empty() { 0 } else { depth }, text);
                text.push_str(line);
                text.push('\n');
            }
        }
        scalar => {
            text.push(' ');
            write_value(scalar, depth, text);
        }
    }
}

/// Whether a key needs no quotes: it is no number, and no word that some readers take for a truth value.
fn is_plain(key: &str) -> bool {
    key.starts_with(|c: char| c.is_ascii_alphabetic())
        && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        && !["y", "n", "yes", "no", "on", "off", "true", "false", "null"]
            .contains(&key.to_ascii_lowercase().as_str())
}

/// Whether a text is the same as a block: several lines, the last one ended, the first not indented, and nothing that only an
/// escape can write.
fn is_block(text: &str) -> bool {
    let plain =
        |c: char| c == '\n' || (!c.is_control() && c != '\u{feff}' && c != '\u{2028}' && c != '\u{2029}');
    text.trim_end_matches('\n').contains('\n')
        && text.ends_with('\n')
        && !text.ends_with("\n\n")
        && !text.starts_with([' ', '\n'])
        && text.chars().all(plain)
}

fn indent(depth: usize, text: &mut String) {
    text.extend(std::iter::repeat_n(' ', depth));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_written_as_yaml_reads_them() {
        let value = json!({
            "a": {"x": 1, "empty": {}, "none": []},
            "b": ["-q", {"name": "it's: \"#1\"", "list": [1, 2]}],
            "run": "first\n  second\n\nlast\n",
            "odd": " not a block\n",
            "on": true,
        });
        let expected = "a:
  x: 1
  empty: {}
  none: []
b:
  - \"-q\"
  - name: \"it's: \\\"#1\\\"\"
    list:
      - 1
      - 2
run: |
  first
    second

  last
odd: \" not a block\\n\"
\"on\": true
";
        assert_eq!(yaml(&value), expected);
    }
}
