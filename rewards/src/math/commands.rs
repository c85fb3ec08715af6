//! Names of LaTeX commands, signs of Unicode and names of functions.

use super::lex::MathToken;
use super::node::{MathFunction, Relation};

/// Whether a command has no meaning for an answer.
pub(super) fn ignored(name: &str) -> bool {
    matches!(
        name,
        "displaystyle"
            | "textstyle"
            | "scriptstyle"
            | "limits"
            | "nolimits"
            | "big"
            | "Big"
            | "bigg"
            | "Bigg"
            | "bigl"
            | "bigr"
            | "Bigl"
            | "Bigr"
            | "biggl"
            | "biggr"
            | "quad"
            | "qquad"
            | "enspace"
            | "thinspace"
            | "ldots"
            | "dots"
            | "cdots"
            | "boxed"
            | "fbox"
            | "hline"
            | "nonumber"
            | "strut"
            | "square"
            | "blacksquare"
            | "qed"
            | "euro"
            | "tiny"
            | "small"
            | "large"
            | "Large"
            | "LARGE"
            | "huge"
            | "Huge"
            | "bf"
            | "pounds"
    )
}

/// The token of a command that is another way to write it.
pub(super) fn translated(name: &str) -> Option<MathToken> {
    let relation = match name {
        "le" | "leq" | "leqslant" | "leqq" => Relation::LessEqual,
        "ge" | "geq" | "geqslant" | "geqq" => Relation::GreaterEqual,
        "lt" => Relation::Less,
        "gt" => Relation::Greater,
        "ne" | "neq" => Relation::Unequal,
        "approx" | "simeq" | "sim" | "thickapprox" => Relation::Approximately,
        "equiv" => Relation::Congruent,
        "in" => Relation::In,
        "notin" => Relation::NotIn,
        "eq" => Relation::Equal,
        _ => {
            return Some(match name {
                "cdot" | "times" | "ast" | "bullet" => MathToken::Sign('*'),
                "div" => MathToken::Sign('/'),
                "pm" => MathToken::Sign('\u{b1}'),
                "mp" => MathToken::Sign('\u{2213}'),
                "cup" | "bigcup" | "lor" | "vee" => MathToken::Sign('\u{222a}'),
                "cap" | "bigcap" | "land" | "wedge" => MathToken::Sign('\u{2229}'),
                "setminus" | "backslash" | "smallsetminus" => MathToken::Sign('\u{2216}'),
                "lvert" | "rvert" | "vert" | "mid" | "lVert" | "rVert" | "Vert" => MathToken::Sign('|'),
                "colon" => MathToken::Sign(':'),
                "circ" | "degree" => MathToken::Command("circ".to_owned()),
                "lbrack" => MathToken::Sign('['),
                "rbrack" => MathToken::Sign(']'),
                "lparen" => MathToken::Sign('('),
                "rparen" => MathToken::Sign(')'),
                "prime" => MathToken::Sign('\''),
                "varnothing" => MathToken::Command("emptyset".to_owned()),
                "dfrac" | "tfrac" | "cfrac" => MathToken::Command("frac".to_owned()),
                "dbinom" | "tbinom" => MathToken::Command("binom".to_owned()),
                "langle" => MathToken::Sign('('),
                "rangle" => MathToken::Sign(')'),
                _ => return None,
            });
        }
    };
    Some(MathToken::Relation(relation))
}

/// The token of a sign.
pub(super) fn unicode(sign: char) -> Option<MathToken> {
    Some(match sign {
        '<' => MathToken::Relation(Relation::Less),
        '>' => MathToken::Relation(Relation::Greater),
        '\u{2264}' => MathToken::Relation(Relation::LessEqual),
        '\u{2265}' => MathToken::Relation(Relation::GreaterEqual),
        '\u{2260}' => MathToken::Relation(Relation::Unequal),
        '\u{2248}' => MathToken::Relation(Relation::Approximately),
        '\u{2208}' => MathToken::Relation(Relation::In),
        '\u{2212}' | '\u{2013}' => MathToken::Sign('-'),
        '\u{d7}' | '\u{b7}' | '\u{22c5}' => MathToken::Sign('*'),
        '\u{f7}' => MathToken::Sign('/'),
        '\u{b1}' | '\u{222a}' | '\u{2229}' | '\u{2216}' => MathToken::Sign(sign),
        '\u{b0}' => MathToken::Command("circ".to_owned()),
        '\u{221e}' => MathToken::Command("infty".to_owned()),
        '\u{221a}' => MathToken::Command("sqrt".to_owned()),
        '\u{3c0}' => MathToken::Command("pi".to_owned()),
        '\u{2205}' => MathToken::Command("emptyset".to_owned()),
        '\u{21a6}' => MathToken::Command("mapsto".to_owned()),
        '\u{2192}' => MathToken::Command("to".to_owned()),
        '\u{211d}' => MathToken::Symbol("\u{211d}".to_owned()),
        sign if sign.is_alphabetic() => MathToken::Symbol(sign.to_string()),
        _ => return None,
    })
}

/// Whether this is the name of a function without a backslash, too.
pub(super) fn is_function(name: &str) -> bool {
    !matches!(name, "tg" | "ctg" | "arctg") && function(name).is_some()
}

/// The function of a name. A logarithm without a base is [`MathFunction::Ln`] until its argument is parsed.
pub(super) fn function(name: &str) -> Option<MathFunction> {
    Some(match name {
        "sin" => MathFunction::Sin,
        "cos" => MathFunction::Cos,
        "tan" | "tg" => MathFunction::Tan,
        "cot" | "ctg" => MathFunction::Cot,
        "sec" => MathFunction::Sec,
        "csc" => MathFunction::Csc,
        "arcsin" | "asin" => MathFunction::Arcsin,
        "arccos" | "acos" => MathFunction::Arccos,
        "arctan" | "atan" | "arctg" => MathFunction::Arctan,
        "arccot" => MathFunction::Arccot,
        "sinh" => MathFunction::Sinh,
        "cosh" => MathFunction::Cosh,
        "tanh" => MathFunction::Tanh,
        "arsinh" | "arcsinh" => MathFunction::Arsinh,
        "arcosh" | "arccosh" => MathFunction::Arcosh,
        "artanh" | "arctanh" => MathFunction::Artanh,
        "exp" => MathFunction::Exp,
        "ln" | "log" | "lg" => MathFunction::Ln,
        "abs" => MathFunction::Abs,
        "floor" => MathFunction::Floor,
        "ceil" => MathFunction::Ceil,
        "max" => MathFunction::Max,
        "min" => MathFunction::Min,
        "gcd" => MathFunction::Gcd,
        "lcm" => MathFunction::Lcm,
        "det" => MathFunction::Det,
        _ => return None,
    })
}

/// The function that is written `f^{-1}`, of those that have one.
pub(super) fn inverse_of(function: MathFunction) -> Option<MathFunction> {
    Some(match function {
        MathFunction::Sin => MathFunction::Arcsin,
        MathFunction::Cos => MathFunction::Arccos,
        MathFunction::Tan => MathFunction::Arctan,
        MathFunction::Cot => MathFunction::Arccot,
        MathFunction::Sinh => MathFunction::Arsinh,
        MathFunction::Cosh => MathFunction::Arcosh,
        MathFunction::Tanh => MathFunction::Artanh,
        _ => return None,
    })
}
