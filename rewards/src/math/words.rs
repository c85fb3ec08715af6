//! Words in and around answers: units, scale words, choices, and the normal form of an answer as text.
//!
//! Invariant: a word that may change a value is never removed as a unit.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

/// The physical unit that words after a number name. Two different physical units contradict each other.
///
/// `None` for counted things (`apples`, `bolts of fabric`), which an answer may omit.
pub(super) fn unit(words: &str) -> Option<String> {
    const UNITS: [(&str, &[&str]); 35] = [
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
        ("mi/h", &["mph"]),
        ("km/h", &["kmph", "kmh"]),
        ("cent", &["cent"]),
        ("dollar", &["dollar", "usd"]),
        ("euro", &["euro", "eur"]),
        ("ohm", &["ohm"]),
        ("radian", &["rad", "radian"]),
        ("acre", &["acre"]),
        ("celsius", &["celsius"]),
        ("fahrenheit", &["fahrenheit"]),
    ];
    let words = words.trim().to_ascii_lowercase();
    let names = |name: &str| UNITS.iter().find(|(_, all)| all.contains(&name)).map(|(unit, _)| *unit);
    let single = |part: &str| {
        let part = part.trim().trim_end_matches('.');
        names(part).or_else(|| names(part.strip_suffix('s')?))
    };
    // "miles per hour", "m/s"
    let parts = words.split('/').flat_map(|part| part.split(" per "));
    Some(parts.map(single).collect::<Option<Vec<_>>>()?.join("/"))
}

/// The factor that a word after a number stands for.
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

/// Whether a word next to a number changes its value.
pub(super) fn changes_value(word: &str) -> bool {
    const CHANGING: [&str; 24] = [
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
        "most",
        "least",
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

/// Commands around text that do not change its meaning.
const TEXT: [&str; 10] =
    ["text", "textbf", "textit", "textrm", "textnormal", "mathrm", "mathbf", "mbox", "operatorname", "boxed"];

/// The tokens of an answer as written. Two answers with equal tokens are equal, whatever their meaning.
///
/// Delimiters, sizes and blanks that separate nothing are removed. Braces, signs and case stay.
pub(super) fn written(answer: &str) -> String {
    let mut out = String::with_capacity(answer.len());
    let mut rest = answer.trim();
    let mut blank = false;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '\\' => {
                let len = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
                let len = if len == 0 { rest.chars().next().map_or(0, char::len_utf8) } else { len };
                let (name, after) = rest.split_at(len);
                rest = after;
                match name {
                    "left" | "right" | "displaystyle" | "big" | "Big" | "bigl" | "bigr" | "$" | "!" => {}
                    "quad" | "qquad" | "," | ";" | ":" | " " => blank = true,
                    name => {
                        let name = match name {
                            "dfrac" | "tfrac" | "cfrac" => "frac",
                            "leq" => "le",
                            "geq" => "ge",
                            name => name,
                        };
                        blank = false;
                        out.extend(["\\", name, " "]);
                    }
                }
            }
            '$' => {}
            c if c.is_whitespace() || c == '~' => blank = true,
            c => {
                // `1 2` is not 12, and `1, 234` not 1,234.
                let parts = |c: char| c.is_alphanumeric() || c == ',' || c == '.';
                if blank && parts(c) && out.ends_with(parts) {
                    out.push(' ');
                }
                blank = false;
                out.push(if c == '\u{2212}' { '-' } else { c });
            }
        }
    }
    out.trim_end_matches(['.', ',', ';', ':', ' ']).to_owned()
}

/// Words without mathematics in normal form: no `\text`, one blank between words, lower case. `None` otherwise.
pub(super) fn prose(answer: &str) -> Option<String> {
    let mut plain = String::with_capacity(answer.len());
    let mut open = 0usize;
    let mut rest = answer.trim();
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '\\' => {
                let len = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
                let (name, after) = rest.split_at(len);
                if TEXT.contains(&name) {
                    rest = after.trim_start().strip_prefix('{')?;
                    open += 1;
                } else if len == 0 && after.starts_with([' ', ',', ';']) {
                    plain.push(' ');
                    rest = &after[1..];
                } else {
                    return None;
                }
            }
            '}' => open = open.checked_sub(1)?,
            '$' | '*' | '"' => {}
            '~' => plain.push(' '),
            c if c.is_alphanumeric() || c.is_whitespace() || "-'.,:()".contains(c) => plain.push(c),
            _ => return None,
        }
    }
    let words: Vec<&str> = plain.split_whitespace().collect();
    let word = |run: &str| {
        let named = run.len() > 2 && run.bytes().skip(1).all(|byte| byte.is_ascii_lowercase());
        run.is_ascii() && (named || run.eq_ignore_ascii_case("no"))
    };
    let known = plain.split(|c: char| !c.is_alphanumeric()).any(word);
    let joined = words.join(" ").to_lowercase();
    known.then(|| joined.trim_end_matches(['.', ',', ':']).to_owned())
}

/// The value of a number in words up to 999, such as `seven` and `twenty-one`.
pub(super) fn spelled(text: &str) -> Option<i64> {
    const SMALL: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let lower = text.to_ascii_lowercase();
    let (mut hundreds, mut tens, mut units) = (None, None, None);
    for word in lower.split(|c: char| c == '-' || c.is_whitespace()).filter(|word| !word.is_empty()) {
        let place = |words: &[&str]| {
            words.iter().position(|known| *known == word).and_then(|at| i64::try_from(at).ok())
        };
        if let Some(value) = place(&SMALL) {
            let fits = units.is_none() && (tens.is_none() || (1..10).contains(&value));
            units = fits.then_some(Some(value))?;
        } else if let Some(value) = place(&TENS) {
            tens = (tens.is_none() && units.is_none()).then_some(Some(10 * (value + 2)))?;
        } else if word == "hundred" {
            let factor = units.take().filter(|value| (1..10).contains(value))?;
            hundreds = (hundreds.is_none() && tens.is_none()).then_some(Some(100 * factor))?;
        } else if word != "and" || hundreds.is_none() {
            return None;
        }
    }
    hundreds.or(tens).or(units)?;
    Some(hundreds.unwrap_or(0) + tens.unwrap_or(0) + units.unwrap_or(0))
}

/// The currency of the sign at the begin or end of an amount.
pub(super) fn currency(text: &str) -> Option<&'static str> {
    let text = text.trim();
    let pair = text.len() > 1 && text.starts_with('$') && text[1..].contains('$');
    let signs = [("\\$", "dollar"), ("$", "dollar"), ("\u{20ac}", "euro"), ("\\euro", "euro")];
    let stands = |sign: &str| (text.starts_with(sign) || text.ends_with(sign)) && !(pair && sign == "$");
    signs.iter().find(|(sign, _)| stands(sign)).map(|(_, unit)| *unit)
}

/// The text with `am` and `pm` for `a.m.` and `P. M.`, if it has a time of day.
pub(super) fn one_meridiem(text: &str) -> Cow<'_, str> {
    static DOTTED: LazyLock<Regex> = LazyLock::new(|| super::ending::compiled(r"(?i)\b([ap])\.\s?m\b\.?"));
    if text.contains(':') { DOTTED.replace_all(text, "${1}m") } else { text.into() }
}

/// Whether words state that a condition has no solution.
pub(super) fn nothing(words: &str) -> bool {
    matches!(
        words.to_ascii_lowercase().trim_end_matches('s'),
        "no solution"
            | "no real solution"
            | "empty set"
            | "the empty set"
            | "there is no solution"
            | "there are no solution"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_one_name_each() {
        assert_eq!(unit(" Meters.").as_deref(), Some("m"));
        assert_eq!(unit("inches").as_deref(), Some("in"));
        assert_eq!(unit("miles per hour"), unit("mph"));
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
        assert_eq!(prose("$\\text{Evelyn}$."), prose("evelyn"));
        assert_eq!(written("\\left( 1,\\ \\infty \\right)"), written("(1,\\infty)"));
        assert_ne!(written("E"), written("e"));
        assert_ne!(written("\\pi x"), written("\\pix"));
        assert_eq!(prose("\u{e9}ab"), None);
        assert_eq!(prose("2*3"), None);
        assert_eq!(prose("\\frac{1}{2}"), None);
    }

    #[test]
    fn numbers_in_words() {
        assert_eq!(spelled("Seven"), Some(7));
        assert_eq!(spelled("one hundred and twenty-one"), Some(121));
        assert_eq!(spelled("twenty eleven").or(spelled("and")).or(spelled("apples")), None);
    }
}
