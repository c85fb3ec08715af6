//! Cuts LaTeX or plain notation into tokens.
//!
//! Invariant: sizes, spacing, dollar and currency signs have no token. Digits with thousands marks are one number. Letters
//! are variables in a formula, and words in plain text and in `\text{...}`.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::Pow;

use super::commands::{ignored, is_function, translated, unicode};
use super::node::{Literal, Relation};
use super::units::{self, superscript};
use super::words;

/// Longest answer that is read, in bytes.
pub(super) const MAX_BYTES: usize = 4096;
/// Most tokens of an answer.
const MAX_TOKENS: usize = 1024;
/// Most digits of a number.
const MAX_DIGITS: usize = 400;
/// Deepest nesting of texts and formulas.
const MAX_DEPTH: usize = 6;

/// The smallest unit of notation.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MathToken {
    Number(Literal, String),
    Symbol(String),
    Word(String),
    Command(String),
    Sign(char),
    Relation(Relation),
    SetOpen,
    SetClose,
    Break,
    Begin(String),
    End(String),
}

/// A token and whether white space precedes it.
#[derive(Clone, Debug)]
pub(super) struct Lexeme {
    pub(super) token: MathToken,
    pub(super) spaced: bool,
}

/// How letters and commas are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Runs of letters are variables.
    Formula,
    /// Runs of letters are words; `$...$` is a formula.
    Plain,
    /// As plain, and a comma between digits is a decimal point.
    PlainDecimalComma,
}

/// The tokens of an answer, or `None` if it is too long or cannot be tokenized.
pub(super) fn tokens(text: &str, mode: Mode) -> Option<Vec<Lexeme>> {
    if text.len() > MAX_BYTES {
        return None;
    }
    let text = unescaped(text);
    let mut lexer = Lexer { out: Vec::with_capacity(16), brackets: 0, single: 0 };
    lexer.run(&text, mode, 0)?;
    Some(lexer.out)
}

/// Undoes the doubled backslashes of a string literal.
fn unescaped(text: &str) -> std::borrow::Cow<'_, str> {
    let doubled = |at: usize| text[at + 2..].starts_with(|c: char| c.is_ascii_alphabetic());
    let commands = !text.contains("\\begin") && text.match_indices("\\\\").any(|(at, _)| doubled(at));
    if commands || text.contains("\\\\begin") { text.replace("\\\\", "\\").into() } else { text.into() }
}

struct Lexer {
    out: Vec<Lexeme>,
    /// Number of open round and square brackets and sets. A comma inside separates.
    brackets: usize,
    /// Number of next digits that are numbers of one digit, after `\frac` or `\sqrt` without braces.
    single: usize,
}

impl Lexer {
    fn push(&mut self, token: MathToken, spaced: bool) {
        self.out.push(Lexeme { token, spaced });
    }

    fn run(&mut self, text: &str, mode: Mode, depth: usize) -> Option<()> {
        let mut rest = text;
        let mut spaced = false;
        while let Some(c) = rest.chars().next() {
            if self.out.len() > MAX_TOKENS || depth > MAX_DEPTH {
                return None;
            }
            let before = self.out.len();
            rest = match c {
                c if c.is_whitespace() || "~\u{200b}".contains(c) => {
                    spaced = true;
                    rest = &rest[c.len_utf8()..];
                    continue;
                }
                '0'..='9' => self.number(rest, mode, spaced)?,
                '.' if rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                    self.number(rest, mode, spaced)?
                }
                '\\' => self.command(rest, mode, spaced, depth)?,
                '$' => self.dollar(rest, mode, depth)?,
                'a'..='z' | 'A'..='Z' => self.letters(rest, mode, spaced),
                _ => self.sign(rest, spaced)?,
            };
            spaced = spaced && self.out.len() == before;
        }
        Some(())
    }

    /// A formula inside plain text; a lone dollar is money.
    fn dollar<'a>(&mut self, text: &'a str, mode: Mode, depth: usize) -> Option<&'a str> {
        let inner = text.trim_start_matches('$');
        if mode == Mode::Formula {
            return Some(inner);
        }
        let Some(end) = inner.find('$') else { return Some(inner) };
        self.run(&inner[..end], Mode::Formula, depth + 1)?;
        Some(inner[end..].trim_start_matches('$'))
    }

    fn number<'a>(&mut self, text: &'a str, mode: Mode, spaced: bool) -> Option<&'a str> {
        if self.single > 0 {
            self.single -= 1;
            let (digit, rest) = text.split_at(1);
            self.push(MathToken::Number(literal(digit, "")?, digit.to_owned()), spaced);
            return (digit != ".").then_some(rest);
        }
        let (digits, mut rest) = self.whole_part(text, mode);
        let mut decimals = "";
        let point = rest.strip_prefix('.').or_else(|| rest.strip_prefix("{.}"));
        let comma = rest.strip_prefix(',').filter(|_| mode == Mode::PlainDecimalComma);
        // `0{,}5`, where the braces mark no thousands.
        let comma =
            comma.or_else(|| rest.strip_prefix("{,}").filter(|_| text.len() - rest.len() == digits.len()));
        if let Some(after) = point.or(comma) {
            let len = digit_count(after);
            if len > 0
                || (point.is_some() && !after.trim_start().is_empty() && !after.starts_with(['.', ' ']))
            {
                (decimals, rest) = after.split_at(len);
            }
        }
        let mut number = literal(&digits, decimals)?;
        // `1.5e3` and `2E-4`, but not `2e` or `2e^x`.
        if let Some(power) = rest.strip_prefix(['e', 'E']) {
            let sign = usize::from(power.starts_with(['-', '+']));
            let len = sign + digit_count(&power[sign..]);
            if len > sign && (mode != Mode::Formula || !decimals.is_empty()) {
                let exponent: i32 = power[..len].parse().ok()?;
                let size =
                    usize::try_from(exponent.unsigned_abs()).ok().filter(|size| *size <= MAX_DIGITS)?;
                let ten = BigRational::from(BigInt::from(10u8).pow(u32::try_from(size).ok()?));
                number.value = if exponent < 0 { number.value / ten } else { number.value * ten };
                number.places = 0;
                rest = &power[len..];
            }
        }
        self.push(MathToken::Number(number, digits), spaced);
        Some(rest)
    }

    /// The digits before the decimal point, thousands marks removed.
    fn whole_part<'a>(&self, text: &'a str, mode: Mode) -> (String, &'a str) {
        let (first, mut rest) = text.split_at(digit_count(text));
        let mut digits = first.to_owned();
        if (1..=3).contains(&first.len()) && !first.starts_with('0') {
            while let Some(len) = thousands_mark(rest, self.brackets > 0, mode) {
                if digit_count(&rest[len..]) != 3 {
                    break;
                }
                digits.push_str(&rest[len..len + 3]);
                rest = &rest[len + 3..];
            }
        }
        (digits, rest)
    }

    fn letters<'a>(&mut self, text: &'a str, mode: Mode, spaced: bool) -> &'a str {
        let len = text.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (run, rest) = text.split_at(len);
        self.single = self.single.saturating_sub(1);
        let lower = run.to_ascii_lowercase();
        if len > 1 && self.known_name(&lower, run, mode, rest, spaced) {
            return rest;
        }
        let word = if mode == Mode::Formula { words::looks_like_a_word(run) } else { len > 1 };
        // "1orW(x)": no blank around the word.
        for joint in ["or", "and"] {
            if let Some(tail) = run.strip_prefix(joint).filter(|tail| tail.len() == 1 && word) {
                self.push(MathToken::Word(joint.to_owned()), spaced);
                self.push(MathToken::Symbol(tail.to_owned()), false);
                return rest;
            }
        }
        if word {
            let possessive = rest.strip_prefix("'s").unwrap_or(rest);
            self.push(MathToken::Word(run.to_owned()), spaced);
            return possessive;
        }
        for (at, letter) in run.chars().enumerate() {
            self.push(MathToken::Symbol(letter.to_string()), spaced && at == 0);
        }
        rest
    }

    /// Names with the same meaning with and without a backslash.
    fn known_name(&mut self, lower: &str, run: &str, mode: Mode, rest: &str, spaced: bool) -> bool {
        let token = match lower {
            "and" | "or" | "percent" | "percentage" | "pct" => MathToken::Word(lower.to_owned()),
            "is" | "are" | "equals" if mode != Mode::Formula => MathToken::Relation(Relation::Equal),
            "infinity" | "inf" | "infty" => MathToken::Command("infty".to_owned()),
            "pi" | "sqrt" | "frac" => MathToken::Command(lower.to_owned()),
            name if run == name
                && is_function(name)
                && !self.is_time(name, rest)
                && (mode != Mode::Formula || rest.trim_start().starts_with('(')) =>
            {
                MathToken::Command(name.to_owned())
            }
            _ => return false,
        };
        self.push(token, spaced);
        true
    }

    /// Whether `min` or `sec` after a number is a unit and no function.
    fn is_time(&self, name: &str, rest: &str) -> bool {
        let number = matches!(self.out.last(), Some(Lexeme { token: MathToken::Number(..), .. }));
        let rest = rest.trim_start();
        // `2 sec x`
        let argument = rest.bytes().take_while(u8::is_ascii_alphabetic).count() == 1;
        number && matches!(name, "min" | "sec") && !argument && !rest.starts_with(['(', '{', '_', '\\'])
    }

    fn command<'a>(&mut self, text: &'a str, mode: Mode, spaced: bool, depth: usize) -> Option<&'a str> {
        let after = &text[1..];
        let len = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        if len == 0 {
            return self.escaped_sign(after, spaced);
        }
        let (name, rest) = split_name(after, len);
        match name {
            "left" | "right" | "middle" | "mleft" | "mright" => {
                return Some(rest.strip_prefix('.').unwrap_or(rest));
            }
            "begin" | "end" => {
                let (environment, rest) = rest.trim_start().strip_prefix('{')?.split_once('}')?;
                let environment = environment.to_owned();
                let token =
                    if name == "begin" { MathToken::Begin(environment) } else { MathToken::End(environment) };
                self.push(token, spaced);
                return Some(rest);
            }
            "text" | "textbf" | "textit" | "textrm" | "textnormal" | "mathrm" | "mbox" | "operatorname"
            | "mathop" | "textsf" | "texttt" | "mathsf" | "rm" | "hbox" => {
                return self.text(name, rest, mode, spaced, depth);
            }
            "color" | "textcolor" => return Some(rest.trim_start().strip_prefix('{')?.split_once('}')?.1),
            "lbrace" => self.push(MathToken::SetOpen, spaced),
            "rbrace" => self.push(MathToken::SetClose, spaced),
            name if ignored(name) => return Some(rest),
            name => match translated(name) {
                Some(token) => self.push(token, spaced),
                None => self.push(MathToken::Command(name.to_owned()), spaced),
            },
        }
        let braced = rest.trim_start().starts_with(['{', '[', '(']);
        match name {
            "frac" | "dfrac" | "tfrac" | "cfrac" if !braced => self.single = 2,
            "sqrt" if !braced => self.single = 1,
            _ => {}
        }
        Some(rest)
    }

    fn escaped_sign<'a>(&mut self, after: &'a str, spaced: bool) -> Option<&'a str> {
        let sign = after.chars().next()?;
        match sign {
            '{' => {
                self.brackets += 1;
                self.push(MathToken::SetOpen, spaced);
            }
            '}' => {
                self.brackets = self.brackets.saturating_sub(1);
                self.push(MathToken::SetClose, spaced);
            }
            '\\' => self.push(MathToken::Break, spaced),
            '%' => self.push(MathToken::Sign('%'), spaced),
            '|' => self.push(MathToken::Sign('|'), spaced),
            _ => {}
        }
        Some(&after[sign.len_utf8()..])
    }

    /// `\text{...}`: words, numbers, one letter, or the name of a function.
    fn text<'a>(
        &mut self,
        name: &str,
        rest: &'a str,
        mode: Mode,
        spaced: bool,
        depth: usize,
    ) -> Option<&'a str> {
        let rest = rest.trim_start().trim_start_matches('*');
        let Some(inner) = rest.strip_prefix('{') else {
            return if name == "rm" || rest.is_empty() { Some(rest) } else { None };
        };
        let len = super::extract::balanced(inner)?;
        let (content, rest) = (&inner[..len], &inner[len + 1..]);
        let trimmed = content.trim();
        if is_function(trimmed) && !self.is_time(trimmed, rest) {
            self.push(MathToken::Command(trimmed.to_owned()), spaced);
        } else if !self.out.is_empty() && words::unit(trimmed).is_some() {
            self.push(MathToken::Word(trimmed.to_owned()), true);
        } else if let Some((unit, power)) = units::with_exponent(trimmed).filter(|_| !self.out.is_empty()) {
            self.push(MathToken::Word(unit.to_owned()), true);
            self.push(MathToken::Sign('^'), false);
            self.push(MathToken::Number(literal(power, "")?, power.to_owned()), false);
        } else if name == "operatorname" {
            self.push(MathToken::Symbol(trimmed.to_owned()), spaced);
        } else if !trimmed.is_empty() && trimmed != "th" {
            let first = self.out.len();
            let inner = if mode == Mode::Formula { Mode::Plain } else { mode };
            self.run(content, inner, depth + 1)?;
            if let Some(lexeme) = self.out.get_mut(first) {
                lexeme.spaced = true;
            }
        }
        Some(rest)
    }

    /// A run of superscript digits is an exponent.
    fn superscript<'a>(&mut self, text: &'a str) -> Option<&'a str> {
        let len = text.find(|c| superscript(c).is_none()).unwrap_or(text.len());
        let plain: String = text[..len].chars().filter_map(superscript).collect();
        let digits = plain.strip_prefix('-').unwrap_or(&plain);
        let number = literal(digits, "").filter(|_| !digits.contains('-'))?;
        self.push(MathToken::Sign('^'), false);
        if digits.len() < plain.len() {
            self.push(MathToken::Sign('-'), false);
        }
        self.push(MathToken::Number(number, digits.to_owned()), false);
        Some(&text[len..])
    }

    fn sign<'a>(&mut self, text: &'a str, spaced: bool) -> Option<&'a str> {
        let sign = text.chars().next()?;
        let rest = &text[sign.len_utf8()..];
        let two = |second: char| rest.strip_prefix(second);
        let (token, rest) = match sign {
            '<' | '>' if two('=').is_some() => {
                let relation = if sign == '<' { Relation::LessEqual } else { Relation::GreaterEqual };
                (MathToken::Relation(relation), &rest[1..])
            }
            '=' if two('>').is_some() => return None,
            '=' => (MathToken::Relation(Relation::Equal), two('=').unwrap_or(rest)),
            '!' if two('=').is_some() => (MathToken::Relation(Relation::Unequal), &rest[1..]),
            '*' => (MathToken::Sign(if two('*').is_some() { '^' } else { '*' }), two('*').unwrap_or(rest)),
            '{' if rest.trim_start().starts_with('}') => {
                return rest.trim_start().strip_prefix('}');
            }
            '&' | '+' | '-' | '/' | '^' | '_' | '{' | '}' | '|' | ',' | ';' | ':' | '!' | '%' | '\'' => {
                (MathToken::Sign(sign), rest)
            }
            '(' | '[' => {
                self.brackets += 1;
                (MathToken::Sign(sign), rest)
            }
            ')' | ']' => {
                self.brackets = self.brackets.saturating_sub(1);
                (MathToken::Sign(sign), rest)
            }
            '.' | '"' | '`' | '?' | '\u{20ac}' | '\u{a3}' | '\u{a5}' | '\u{2019}' => return Some(rest),
            sign if superscript(sign).is_some() => return self.superscript(text),
            sign if units::fraction(sign).is_some() => {
                let (numerator, denominator) = units::fraction(sign)?;
                self.push(MathToken::Command("frac".to_owned()), spaced);
                for digit in [numerator, denominator] {
                    self.push(MathToken::Number(literal(digit, "")?, digit.to_owned()), false);
                }
                return Some(rest);
            }
            sign => (unicode(sign)?, rest),
        };
        self.push(token, spaced);
        Some(rest)
    }
}

/// Length of a thousands mark at the begin of the text, bytes.
fn thousands_mark(text: &str, inside_brackets: bool, mode: Mode) -> Option<usize> {
    let trimmed = text.trim_start_matches(' ');
    if let Some(inner) = trimmed.strip_prefix('{') {
        let inner =
            inner.trim_start().strip_prefix(',')?.trim_start().strip_prefix('}')?.trim_start_matches(' ');
        return Some(text.len() - inner.len());
    }
    let space = ["\\,", "\\ ", "~", " ", "\\!", "\u{a0}", "\u{202f}", "\u{2009}"];
    if let Some(mark) = space.iter().find(|mark| text.starts_with(**mark)) {
        return (!inside_brackets).then_some(mark.len());
    }
    let after = text.strip_prefix(',')?;
    if let Some(mark) = ["\\!", "\\,"].iter().find(|mark| after.starts_with(**mark)) {
        let digits = after[mark.len()..].trim_start_matches(' ');
        return (*mark == "\\!" || !inside_brackets).then_some(text.len() - digits.len());
    }
    (!inside_brackets || mode != Mode::Formula).then_some(1)
}

/// The exact value of digits with decimals.
fn literal(digits: &str, decimals: &str) -> Option<Literal> {
    if digits.len() + decimals.len() > MAX_DIGITS || (digits.is_empty() && decimals.is_empty()) {
        return None;
    }
    let leading = digits.bytes().chain(decimals.bytes()).take_while(|digit| *digit == b'0').count();
    let significant = u32::try_from(digits.len() + decimals.len() - leading).ok()?;
    let places = u32::try_from(decimals.len()).ok()?;
    let value = if digits.len() + decimals.len() <= 18 {
        let whole = digits.bytes().chain(decimals.bytes()).try_fold(0i64, |value, digit| {
            digit.is_ascii_digit().then(|| value * 10 + i64::from(digit - b'0'))
        })?;
        BigRational::new(whole.into(), 10i64.pow(places).into())
    } else {
        let whole: BigInt = format!("{digits}{decimals}").parse().ok()?;
        BigRational::new(whole, BigInt::from(10u8).pow(places))
    };
    Some(Literal { value, places, significant })
}

pub(super) fn digit_count(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

/// The name of a command. A name that runs into the next word (`\quadx`) is cut.
fn split_name(after: &str, len: usize) -> (&str, &str) {
    const CUT: [&str; 10] = ["qquad", "quad", "infty", "times", "cdot", "sqrt", "frac", "neq", "leq", "geq"];
    let name = &after[..len];
    let cut = CUT.iter().find(|known| name.starts_with(**known) && name.len() == known.len() + 1);
    after.split_at(cut.map_or(len, |known| known.len()))
}
