//! Units beside numbers in plain text, where a letter may also be a variable, and decimal commas.
//!
//! Invariant: a single letter is a unit only with an exponent or in a quotient of units (`12m^2`, `5 m/s`). A comma is a
//! decimal point only where it cannot mark thousands.

use std::sync::LazyLock;

use regex::Regex;

use super::ending::compiled;
use super::words;

/// What stands where the value of the text is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Reference,
    Answer,
}

/// The plain digit or minus of a superscript one.
pub(super) fn superscript(c: char) -> Option<char> {
    Some(match c {
        '\u{b9}' => '1',
        '\u{b2}' => '2',
        '\u{b3}' => '3',
        '\u{2070}' => '0',
        '\u{2074}'..='\u{2079}' => char::from_digit(u32::from(c) - 0x2070, 10)?,
        '\u{207b}' => '-',
        _ => return None,
    })
}

/// Numerator and denominator of a fraction that is one character.
pub(super) fn fraction(c: char) -> Option<(&'static str, &'static str)> {
    Some(match c {
        '\u{bd}' => ("1", "2"),
        '\u{bc}' => ("1", "4"),
        '\u{be}' => ("3", "4"),
        '\u{2153}' => ("1", "3"),
        '\u{2154}' => ("2", "3"),
        '\u{2155}' => ("1", "5"),
        '\u{2159}' => ("1", "6"),
        '\u{215b}' => ("1", "8"),
        _ => return None,
    })
}

/// A unit with its exponent, and another one that it is divided by.
const UNIT: &str = r"(mm|cm|dm|km|m|in|ft|yd|mi|mg|kg|g|ml|mL|l|L)(\x{b2}|\x{b3}|\^?\{?[23]\}?)?(?:/(mm|cm|km|m|s|sec|min|h|hr|day|kg|g|ml|mL|l|L)(\x{b2}|\x{b3}|\^?\{?[23]\}?)?)?";

/// The text with units as words, `12\text{m}^2` for `12m^2`, if it has units that could be read as variables.
///
/// In a reference a single letter stays a variable.
pub(super) fn with_units(text: &str, side: Side) -> Option<String> {
    static GLUED: LazyLock<Regex> =
        LazyLock::new(|| compiled(&format!(r"([0-9])([ \x{{a0}}]?){UNIT}(?:([\s.,;)])|$)")));
    let mut changed = false;
    let whole = GLUED.replace_all(text, |found: &regex::Captures<'_>| {
        let part = |at: usize| found.get(at).map_or("", |part| part.as_str());
        let (first, power, second, other) = (part(3), part(4), part(5), part(6));
        let plain = power.is_empty() && second.is_empty();
        if plain || (first.len() == 1 && side == Side::Reference) {
            return part(0).to_owned();
        }
        changed = true;
        let (power, other) = (raised(power), raised(other));
        let quotient = if second.is_empty() { String::new() } else { format!("/\\text{{{second}}}{other}") };
        format!("{}\\text{{{first}}}{power}{quotient}{}", part(1), part(7))
    });
    changed.then(|| whole.into_owned())
}

/// `^2` for the exponent `2`; other exponents unchanged.
fn raised(power: &str) -> String {
    if power.starts_with(|c: char| c.is_ascii_digit()) { format!("^{power}") } else { power.to_owned() }
}

/// A unit and its exponent as a whole text, as in `\text{m^2}`.
pub(super) fn with_exponent(text: &str) -> Option<(&str, &str)> {
    let exponents =
        [("^2", "2"), ("^{2}", "2"), ("\u{b2}", "2"), ("^3", "3"), ("^{3}", "3"), ("\u{b3}", "3")];
    let (unit, exponent) =
        exponents.iter().find_map(|(end, exponent)| Some((text.strip_suffix(end)?.trim_end(), *exponent)))?;
    words::unit(unit).map(|_| (unit, exponent))
}

/// Where the number ends whose unit a text ends with, the exponent as its last digit: `9.8` in `9.8 m/s^2`.
pub(super) fn number_before(text: &str) -> Option<usize> {
    static TRAILING: LazyLock<Regex> = LazyLock::new(|| compiled(&format!(r"[0-9][ \x{{a0}}]?{UNIT}$")));
    // No unit is longer.
    let from = text.char_indices().rev().nth(24).map_or(0, |(at, _)| at);
    let found = TRAILING.find_iter(&text[from..]).last()?;
    Some(from + found.start() + 1)
}

/// Whether a variable that multiplies a number follows it after a blank: `9 n`, `9.8 x^2`, but no unit.
pub(super) fn multiplies(after: &str) -> bool {
    let rest = after.trim_start_matches([' ', '\u{a0}']);
    let mut chars = rest.chars();
    let (first, second) = (chars.next().unwrap_or(' '), chars.next().unwrap_or(' '));
    let raised = superscript(second).is_some() || second == '^';
    let len = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
    let argument = rest[len..].trim_start();
    let applied = argument.starts_with(['(', '\u{3c0}', '\u{3b8}'])
        || argument.bytes().take_while(u8::is_ascii_alphabetic).count() == 1;
    if rest.len() < after.len() && applied && super::commands::is_function(&rest[..len]) {
        return true;
    }
    let variable = "xyzn".contains(first) && !second.is_alphanumeric() && second != '-' && second != '\'';
    rest.len() < after.len() && first.is_ascii_alphabetic() && (variable || (raised && length(rest) == 0))
}

/// Bytes of a unit that follows a number without a blank.
pub(super) fn length(after: &str) -> usize {
    static LEADING: LazyLock<Regex> = LazyLock::new(|| compiled(&format!("^{UNIT}")));
    let ends =
        |len: usize| after[len..].chars().next().is_none_or(|c| c.is_whitespace() || ".,;:)*".contains(c));
    if let Some(found) = LEADING.find(after).filter(|found| found.len() > 1 && ends(found.len())) {
        return found.len();
    }
    let len = after.bytes().take_while(u8::is_ascii_alphabetic).count();
    if len > 1 && ends(len) && words::unit(&after[..len]).is_some() { len } else { 0 }
}

/// Whether a whole text is one amount with a decimal comma: two digits follow the comma, as in prices, or a zero precedes
/// it, where no comma marks thousands. A unit or a currency may follow.
///
/// A reference such as `0,1` may also list two values, so in a reference a zero needs two digits after the comma.
pub(super) fn decimal_comma(text: &str, side: Side) -> bool {
    let text = text.trim_start_matches(['-', '\u{2212}', '+', '$', ' ']);
    let Some((whole, rest)) = text.split_once(',') else { return false };
    let len = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (decimals, unit) = rest.split_at(len);
    let zero = whole == "0" && len >= if side == Side::Reference { 2 } else { 1 };
    let price = len == 2 && !whole.is_empty() && whole.bytes().all(|byte| byte.is_ascii_digit());
    let alone =
        unit.is_empty() || (zero && !unit.contains(|c: char| c.is_ascii_digit() || ",;()[]{}=".contains(c)));
    !decimals.is_empty() && alone && (zero || price)
}

/// A physical unit and its power in one notation: `m/s2` for `m/s^2` and for `ms^-2`. `None` for what is counted.
pub(super) fn physical(unit: &str) -> Option<String> {
    let (name, power) = match unit.split_once('^') {
        Some(("ms", "-1")) => ("m/s", ""),
        Some(("ms", "-2")) => ("m/s", "2"),
        Some(parts) => parts,
        None => (unit, ""),
    };
    words::unit(name).map(|name| format!("{name}{power}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_is_a_unit_only_with_an_exponent_or_in_a_quotient() {
        let answer = |text| with_units(text, Side::Answer);
        assert_eq!(answer("12.5m\u{b2}").as_deref(), Some("12.5\\text{m}\u{b2}"));
        assert_eq!(answer("9.8 m/s^2.").as_deref(), Some("9.8\\text{m}/\\text{s}^2."));
        assert_eq!(answer("3 m^3/s").as_deref(), Some("3\\text{m}^3/\\text{s}"));
        assert_eq!(answer("12 cm2").as_deref(), Some("12\\text{cm}^2"));
        assert_eq!(number_before("it is 9.8 m/s^2"), Some(9));
        assert_eq!(number_before("it is x^2"), None);
        assert_eq!(with_exponent("m/s^{2}"), Some(("m/s", "2")));
        assert_eq!(answer("60 km/h").as_deref(), Some("60\\text{km}/\\text{h}"));
        for variable in ["4m", "4 x^2", "4mx^2", "4m^4", "m^2", "4m^2n"] {
            assert_eq!(answer(variable), None, "{variable}");
        }
        assert_eq!(with_units("4m^2", Side::Reference), None);
        assert_eq!(with_units("60 km/h", Side::Reference).as_deref(), Some("60\\text{km}/\\text{h}"));
    }

    #[test]
    fn a_comma_is_a_decimal_point_only_where_it_marks_no_thousands() {
        for text in ["0,111", "-0,5", "1,22", "0,75 kg", "$0,25"] {
            assert!(decimal_comma(text, Side::Answer), "{text}");
        }
        for text in ["1,234", "2,5", "0,", "0,1,2", "(0,1)", "0,1)", "00,1", "10,111", "0,5, 7", "x=0,5 y"] {
            assert!(!decimal_comma(text, Side::Answer), "{text}");
        }
        assert!(decimal_comma("0,11", Side::Reference) && !decimal_comma("0,1", Side::Reference));
    }

    #[test]
    fn superscripts_have_plain_digits() {
        let plain: Option<String> = "\u{207b}\u{b9}\u{2070}\u{2074}\u{b2}".chars().map(superscript).collect();
        assert_eq!(plain.as_deref(), Some("-1042"));
    }
}
