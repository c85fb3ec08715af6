//! Words in and around answers: units, scale words, choices, and the normal form of an answer as text.
//!
//! Invariant: a word that may change a value is never dropped as a unit.

/// The unit that words after a number name, if it is a physical one: then two different ones contradict each other.
///
/// `None` for things that are counted (`apples`, `bolts of fabric`), which an answer may or may not name.
pub(super) fn unit(words: &str) -> Option<&'static str> {
    const UNITS: [(&str, &[&str]); 34] = [
        ("mm", &["mm", "millimeter", "millimetre"]),
        ("cm", &["cm", "centimeter", "centimetre"]),
        ("dm", &["dm", "decimeter", "decimetre"]),
        ("m", &["m", "meter", "metre"]),
        ("km", &["km", "kilometer", "kilometre"]),
        ("in", &["in", "inch", "inche"]),
        ("ft", &["ft", "foot", "feet"]),
        ("yd", &["yd", "yard"]),
        ("mi", &["mi", "mile"]),
        ("mg", &["mg", "milligram"]),
        ("g", &["g", "gram", "gm"]),
        ("kg", &["kg", "kilogram"]),
        ("lb", &["lb", "lbs", "pound"]),
        ("oz", &["oz", "ounce"]),
        ("ms", &["ms", "millisecond"]),
        ("s", &["s", "sec", "second"]),
        ("min", &["min", "minute"]),
        ("h", &["h", "hr", "hour"]),
        ("day", &["day"]),
        ("week", &["week", "wk"]),
        ("month", &["month"]),
        ("year", &["year", "yr"]),
        ("ml", &["ml", "milliliter", "millilitre"]),
        ("l", &["l", "liter", "litre"]),
        ("gal", &["gal", "gallon"]),
        ("mph", &["mph"]),
        ("km/h", &["kmph", "kmh", "km/h", "km/hr"]),
        ("m/s", &["m/s"]),
        ("cent", &["cent"]),
        ("dollar", &["dollar", "usd"]),
        ("euro", &["euro", "eur"]),
        ("ohm", &["ohm"]),
        ("radian", &["rad", "radian"]),
        ("acre", &["acre"]),
    ];
    let words = words.trim().to_ascii_lowercase();
    let single = words.trim_end_matches('.');
    let names = |name: &str| UNITS.iter().find(|(_, all)| all.contains(&name)).map(|(unit, _)| *unit);
    names(single).or_else(|| names(single.strip_suffix('s')?))
}

/// What a word after a number multiplies it by.
pub(super) fn scale(word: &str) -> Option<i64> {
    Some(match word.to_ascii_lowercase().trim_end_matches('s') {
        "dozen" => 12,
        "hundred" => 100,
        "thousand" => 1000,
        "million" => 1_000_000,
        "billion" => 1_000_000_000,
        "trillion" => 1_000_000_000_000,
        _ => return None,
    })
}

/// Whether a word next to a number says that the value is another one.
pub(super) fn changes_value(word: &str) -> bool {
    const CHANGING: [&str; 22] = [
        "half",
        "halves",
        "third",
        "thirds",
        "quarter",
        "quarters",
        "squared",
        "cubed",
        "factorial",
        "pi",
        "sqrt",
        "root",
        "not",
        "no",
        "minus",
        "plus",
        "times",
        "over",
        "divided",
        "modulo",
        "than",
        "score",
    ];
    CHANGING.contains(&word.to_ascii_lowercase().as_str())
}

/// Whether a run of letters in a formula is a word and no product of variables.
pub(super) fn looks_like_a_word(run: &str) -> bool {
    let lower = run.to_ascii_lowercase();
    let vowels = lower.chars().filter(|c| "aeiouy".contains(*c)).count();
    let known = run.len() >= 2 && unit(run).is_some() && lower == run;
    known || (run.len() >= 4 && vowels > 0 && lower.chars().any(|c| c > 'e'))
}

/// The normal form of an answer as text: without delimiters, sizes, blanks, `\text` and case.
///
/// One letter keeps its case, as `E` is not `e`.
pub(super) fn bare(answer: &str) -> String {
    let mut out = String::with_capacity(answer.len());
    let mut rest = answer;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '\\' => rest = bare_command(rest, &mut out),
            '$' | '{' | '}' | '~' | '*' | '"' | '\u{a0}' => {}
            c if c.is_whitespace() => {
                // `1 2` is not 12.
                let digit = |c: char| c.is_ascii_digit();
                if out.ends_with(digit) && rest.trim_start().starts_with(digit) {
                    out.push(' ');
                }
            }
            '\u{2212}' => out.push('-'),
            c => out.push(c),
        }
    }
    let out = out.trim_end_matches(['.', ',', ';', ':']);
    let inner = out.strip_prefix('(').and_then(|inner| inner.strip_suffix(')'));
    let out = inner.filter(|inner| inner.len() == 1).unwrap_or(out);
    if out.len() == 1 { out.to_owned() } else { out.to_ascii_lowercase() }
}

fn bare_command<'a>(rest: &'a str, out: &mut String) -> &'a str {
    let len = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
    if len == 0 {
        let Some(sign) = rest.chars().next() else { return rest };
        if "%{}".contains(sign) {
            out.push(sign);
        }
        return &rest[sign.len_utf8()..];
    }
    let (name, after) = rest.split_at(len);
    match name {
        "left" | "right" | "displaystyle" | "big" | "Big" | "bigl" | "bigr" | "quad" | "qquad" | "text"
        | "textbf" | "textit" | "textrm" | "mathrm" | "mathbf" | "mbox" | "operatorname" | "rm" | "boxed" => {
        }
        "dfrac" | "tfrac" | "cfrac" => out.push_str("\\frac"),
        "leq" => out.push_str("\\le"),
        "geq" => out.push_str("\\ge"),
        name => {
            out.push('\\');
            out.push_str(name);
        }
    }
    after
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_one_name_each() {
        assert_eq!(unit(" Meters."), Some("m"));
        assert_eq!(unit("inches"), Some("in"));
        assert_eq!(unit("hours"), unit("hr"));
        assert_eq!(unit("bolts of fabric"), None);
    }

    #[test]
    fn runs_of_letters_are_words_only_if_they_look_like_it() {
        assert!(looks_like_a_word("bolts") && looks_like_a_word("cm") && looks_like_a_word("Evelyn"));
        assert!(!looks_like_a_word("xy") && !looks_like_a_word("abcd") && !looks_like_a_word("m"));
    }

    #[test]
    fn text_has_one_form() {
        assert_eq!(bare("$\\text{Evelyn}$."), "evelyn");
        assert_eq!(bare("\\textbf{(A)}"), "A");
        assert_eq!(bare("\\left( 1,\\ \\infty \\right)"), "(1,\\infty)");
        assert_ne!(bare("E"), bare("e"));
    }
}
