//! Brings LaTeX and plain notations of an answer to one form.
//!
//! Invariant: only what carries no mathematical meaning is dropped (delimiters, sizes, spacing, currency and degree
//! signs); two texts with one normal form mean the same. It does not check that its input is well-formed.

/// Normal form with blanks and `\text{...}` kept, so that numbers and units can still be told apart.
#[must_use]
pub fn normalise(answer: &str) -> String {
    let mut out = String::with_capacity(answer.len());
    let mut rest = answer;
    while let Some(c) = rest.chars().next() {
        if c == '\\' {
            rest = command(rest, &mut out);
            continue;
        }
        match c {
            '$' | '\u{20ac}' | '\u{a3}' | '\u{b0}' => {}
            '\u{2212}' => out.push('-'),
            '\u{d7}' => out.push_str("\\times "),
            '~' | '\u{a0}' | '\u{202f}' | '\u{2009}' => out.push(' '),
            c => out.push(c),
        }
        rest = &rest[c.len_utf8()..];
    }
    let out = out.replace("{,}", ",").replace("^{\\circ}", "").replace("^\\circ", "").replace("\\degree", "");
    let out = brace_arguments(out.trim());
    out.trim_end_matches('.').trim().to_owned()
}

/// The normal form for comparison as text: without blanks, and with `\text{X}` as `X`.
#[must_use]
pub fn bare(normalised: &str) -> String {
    let mut out = String::with_capacity(normalised.len());
    let mut rest = normalised;
    while let Some(at) = rest.find("\\text{") {
        let inner = &rest[at + 6..];
        let Some(end) = inner.find('}') else { break };
        out.push_str(&rest[..at]);
        out.push_str(&inner[..end]);
        rest = &inner[end + 1..];
    }
    out.push_str(rest);
    out.retain(|c| !c.is_whitespace());
    out
}

/// Translates the command that the text begins with and returns what follows it.
fn command<'a>(text: &'a str, out: &mut String) -> &'a str {
    let after = &text[1..];
    let len = after.bytes().take_while(u8::is_ascii_alphabetic).count();
    if len == 0 {
        let Some(sign) = after.chars().next() else { return after };
        match sign {
            ',' | ';' | ':' | ' ' | '\n' => out.push(' '),
            '!' | '$' | '(' | ')' | '[' | ']' => {}
            '%' => out.push('%'),
            sign => out.extend(['\\', sign]),
        }
        return &after[sign.len_utf8()..];
    }
    let (name, rest) = after.split_at(len);
    match name {
        "dfrac" | "tfrac" | "cfrac" => out.push_str("\\frac"),
        "left" | "right" | "displaystyle" | "big" | "Big" | "bigl" | "bigr" => {}
        "quad" | "qquad" => out.push(' '),
        "le" => out.push_str("\\leq"),
        "ge" => out.push_str("\\geq"),
        "ne" => out.push_str("\\neq"),
        "lt" => out.push('<'),
        "gt" => out.push('>'),
        "cdot" => out.push_str("\\times"),
        "textbf" | "textit" | "textrm" | "mathrm" | "mathbf" | "mbox" | "operatorname" | "rm" => {
            out.push_str("\\text");
        }
        name => out.extend(["\\", name]),
    }
    rest
}

/// Writes `\frac12` as `\frac{1}{2}` and `\sqrt 2` as `\sqrt{2}`.
fn brace_arguments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, name, arguments)) = first_of(rest) {
        out.push_str(&rest[..at + name.len()]);
        rest = rest[at + name.len()..].trim_start_matches(' ');
        for _ in 0..arguments {
            let Some(c) = rest.chars().next().filter(char::is_ascii_alphanumeric) else { break };
            out.extend(['{', c, '}']);
            rest = rest[1..].trim_start_matches(' ');
        }
    }
    out.push_str(rest);
    out
}

fn first_of(text: &str) -> Option<(usize, &'static str, usize)> {
    [("\\frac", 2), ("\\sqrt", 1)]
        .into_iter()
        .filter_map(|(name, arguments)| Some((text.find(name)?, name, arguments)))
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_for_many_notations() {
        for (notation, expected) in [
            ("$\\dfrac12$", "\\frac{1}{2}"),
            ("\\frac 1 2", "\\frac{1}{2}"),
            ("\\frac{1}2", "\\frac{1}2"),
            ("\\sqrt 2+\\sqrt5", "\\sqrt{2}+\\sqrt{5}"),
            ("\\left(1,\\, 2\\right)", "(1,  2)"),
            ("1{,}000", "1,000"),
            ("90^{\\circ}.", "90"),
            ("\\$5", "5"),
            ("5\\%", "5%"),
            ("\\mathrm{cm}", "\\text{cm}"),
            ("\\{1\\}", "\\{1\\}"),
            ("\u{2212}3", "-3"),
        ] {
            assert_eq!(normalise(notation), expected, "{notation:?}");
        }
        assert_eq!(bare("\\text{Evelyn } x\\text{"), "Evelynx\\text{");
    }
}
