//! Decides whether the words around a number state it as the answer or give it another meaning.
//!
//! [`introduces`] uses an allow-list: it is for the words directly between `answer is` or an opening brace and a value.
//! [`states`] uses a deny-list: it is for a number in running text, where any noun may precede it. It rejects words that
//! retract a statement or change the value of the number.
//!
//! Invariant: only the clause of the number is examined. A condition in an earlier clause does not count.

/// Longest clause, characters.
const MAX_CLAUSE: usize = 500;

/// Words before a value that do not change it: articles, copulas, adverbs, and names for an answer.
const NEUTRAL: [&str; 60] = [
    "a",
    "an",
    "the",
    "its",
    "our",
    "my",
    "this",
    "that",
    "it",
    "there",
    "is",
    "are",
    "was",
    "be",
    "will",
    "equals",
    "equal",
    "to",
    "simply",
    "just",
    "only",
    "exactly",
    "precisely",
    "about",
    "approximately",
    "roughly",
    "around",
    "therefore",
    "thus",
    "hence",
    "so",
    "then",
    "indeed",
    "clearly",
    "definitely",
    "also",
    "now",
    "finally",
    "obviously",
    "of",
    "final",
    "correct",
    "answer",
    "value",
    "values",
    "total",
    "result",
    "number",
    "amount",
    "cost",
    "price",
    "solution",
    "solutions",
    "choice",
    "option",
    "usd",
    "rs",
    "and",
    "or",
    "both",
];

/// Words of a sentence about an amount: pronouns, and words for having and getting.
const STATING: [&str; 50] = [
    "he", "she", "they", "we", "you", "i", "has", "have", "had", "needs", "need", "makes", "make", "made",
    "earns", "earn", "earned", "gets", "get", "costs", "spends", "spent", "spend", "pays", "paid", "pay",
    "takes", "took", "take", "buys", "bought", "sold", "sells", "sell", "saves", "saved", "save", "gives",
    "eats", "ate", "uses", "used", "use", "owes", "were", "left", "must", "should", "would", "can",
];

/// Words that make their clause a negation or a supposition.
const DENYING: [&str; 34] = [
    "not",
    "never",
    "no",
    "nor",
    "neither",
    "cannot",
    "cant",
    "without",
    "except",
    "impossible",
    "wrong",
    "incorrect",
    "false",
    "fail",
    "fails",
    "failed",
    "contradiction",
    "contradicts",
    "unlike",
    "if",
    "suppose",
    "assume",
    "assuming",
    "unless",
    "whether",
    "hardly",
    "almost",
    "nearly",
    "exceeds",
    "exceed",
    "exceeding",
    "instead",
    "guess",
    "check",
];

/// Words directly before a number that compare with it or change its value.
const CHANGING: [&str; 42] = [
    "than",
    "least",
    "most",
    "under",
    "over",
    "below",
    "above",
    "beyond",
    "between",
    "within",
    "before",
    "after",
    "until",
    "twice",
    "thrice",
    "double",
    "triple",
    "half",
    "third",
    "quarter",
    "square",
    "squared",
    "cube",
    "cubed",
    "root",
    "first",
    "last",
    "next",
    "times",
    "log",
    "ln",
    "factorial",
    "minus",
    "negative",
    "plus",
    "by",
    "modulo",
    "mod",
    "sqrt",
    "percent",
    "exceeds",
    "versus",
];

/// Nouns that change the value of a number after `of`: `the square of 7`. A `sum of 7` is 7.
const FUNCTIONS: [&str; 17] = [
    "square",
    "cube",
    "root",
    "half",
    "third",
    "quarter",
    "double",
    "triple",
    "multiple",
    "multiples",
    "factor",
    "factors",
    "power",
    "logarithm",
    "factorial",
    "reciprocal",
    "negative",
];

/// Nouns that a number labels and does not count.
const LABELS: [&str; 30] = [
    "step", "steps", "section", "figure", "fig", "question", "problem", "example", "equation", "eq", "case",
    "part", "chapter", "page", "table", "theorem", "lemma", "line", "exercise", "method", "attempt",
    "version", "row", "column", "day", "choice", "item", "rule", "note", "appendix",
];

/// First words after an answer that retract it.
const RETRACTING: [&str; 10] =
    ["actually", "wait", "no", "hmm", "but", "however", "correction", "oops", "scratch", "sorry"];

/// Whether the words between a mark of the answer and its value do not change the value.
pub(super) fn introduces<'a>(words: impl IntoIterator<Item = &'a str>) -> bool {
    words.into_iter().all(|word| NEUTRAL.contains(&word.to_ascii_lowercase().as_str()))
}

/// Whether the words before the only number of an answer sentence do not change the number.
pub(super) fn tells(before: &str) -> bool {
    words(before).enumerate().all(|(at, word)| {
        let lower = lower(word);
        // Names may be anywhere and are no labels: "Janet has 7".
        let name = at < 40 && word.starts_with(|c: char| c.is_ascii_uppercase()) && !special(&lower);
        name || NEUTRAL.contains(&lower.as_str()) || STATING.contains(&lower.as_str())
    })
}

/// Whether the text after an answer retracts it.
pub(super) fn retracts(after: &str) -> bool {
    let next = after.trim_start_matches(|c: char| !c.is_alphanumeric());
    words(next).next().is_some_and(|word| RETRACTING.contains(&lower(word).as_str()))
}

/// Whether the sentence before `answer is` supposes or denies the text after it.
pub(super) fn supposes(before: &str) -> bool {
    let (clause, _) = clause(before);
    words(clause).any(|word| denies(&lower(word)))
}

/// Whether the clause of the number between `before` and `after` states it.
pub(super) fn states(before: &str, after: &str) -> bool {
    let timed = words(after).next().is_some_and(times) && before.trim_end().ends_with("after");
    // "it is full after 6 minutes"
    let before = if timed { before.trim_end().trim_end_matches("after") } else { before };
    follows(after) && precedes(before)
}

/// Whether a word is a unit of time.
fn times(word: &str) -> bool {
    let unit = super::words::unit(word);
    unit.is_some_and(|unit| matches!(&*unit, "s" | "min" | "h" | "day" | "week" | "month" | "year"))
}

/// Whether no word from a number to the end of its clause widens or retracts it.
fn follows(after: &str) -> bool {
    let end = after.find(['.', '!', '?', '\n', ';']).unwrap_or(after.len());
    let mut seen = words(&after[..end]).map(lower);
    let (first, second) = (seen.next().unwrap_or_default(), seen.next().unwrap_or_default());
    let widens = |word: &str| {
        matches!(word, "more" | "less" | "fewer" | "greater" | "above" | "below" | "over" | "under" | "so")
    };
    let bound = match first.as_str() {
        "or" | "and" => widens(&second),
        "at" => matches!(second.as_str(), "most" | "least"),
        "times" | "squared" | "cubed" | "factorial" | "plus" | "minus" | "modulo" => true,
        "is" | "was" => denies(&second),
        _ => false,
    };
    let taken_back = words(&after[..end])
        .map(lower)
        .any(|word| word == "but" || word.starts_with("fail") || word.ends_with("n't"));
    // "64 pens or more"
    let rest: Vec<String> = words(&after[..end]).take(6).map(lower).collect();
    let widened = rest.windows(2).any(|pair| pair[0] == "or" && widens(&pair[1]))
        && !rest.iter().any(|word| word == "whether");
    !bound && !widened && !taken_back && !denies(&first)
}

/// Whether the words before a number in its clause state it.
fn precedes(before: &str) -> bool {
    let (clause, number) = clause(before);
    let all: Vec<String> = words(clause).map(lower).collect();
    // "1 in 14", "20 to 14", "3 out of 14" are no 14; "neither 13 nor 14" is neither.
    if let Some(earlier) = number {
        let joins = |word: &String| matches!(word.as_str(), "or" | "nor" | "and");
        if !all.is_empty()
            && all.iter().all(|word| matches!(word.as_str(), "in" | "to" | "of" | "out" | "vs" | "over"))
        {
            return false;
        }
        if all.iter().all(joins) && !clause.contains('=') {
            return precedes(earlier);
        }
    }
    // After a copula only the words behind it concern the number. The words next to the copula may deny it.
    let copula =
        |word: &String| matches!(word.as_str(), "is" | "are" | "was" | "were" | "be" | "equal" | "equals");
    let copula = all.iter().rposition(copula);
    let from = copula.map_or(0, |at| at.saturating_sub(2));
    let mut spoken = &all[from..];
    // "cannot be 7" and "does not equal 7", but "the number of those that are not blue is 7".
    let plain = |word: &String| matches!(word.as_str(), "is" | "are" | "was" | "were");
    if let Some(at) = copula.filter(|at| plain(&all[*at])) {
        let not = |word: &String| word == "not" || word.ends_with("n't");
        let denied = all[from..at].iter().rposition(not).map_or(from, |before| from + before + 1);
        spoken = &all[denied.min(at)..];
    }
    if all.windows(3).any(|three| three[0] == "not" && three[1] == "the" && three[2] == "case") {
        return false;
    }
    let supposed =
        matches!(all.first().map(String::as_str), Some("if" | "suppose" | "assume" | "unless" | "whether"));
    let impossible = all
        .iter()
        .any(|word| matches!(word.as_str(), "impossible" | "wrong" | "incorrect" | "false" | "check"));
    if supposed || impossible || spoken.iter().any(|word| denies(word)) {
        return false;
    }
    let mut ending =
        spoken.iter().rev().map(String::as_str).skip_while(|word| matches!(*word, "a" | "an" | "the"));
    let Some(last) = ending.next() else { return true };
    let noun = ending.find(|word| !matches!(*word, "a" | "an" | "the")).unwrap_or("");
    match last {
        "of" => !FUNCTIONS.contains(&noun),
        "by" => matches!(noun, "given" | "stated" | "denoted"),
        "to" => noun != "close" && noun != "next",
        last => {
            !LABELS.contains(&last)
                && !CHANGING.contains(&last)
                && !spoken.iter().rev().take(2).any(|word| word == "than")
        }
    }
}

/// The last clause of a text. If a number delimits the clause, also the text up to the end of that number.
fn clause(text: &str) -> (&str, Option<&str>) {
    // A longer text is no clause. The limit keeps texts without a sentence end from being searched as a whole.
    let text = text.char_indices().rev().take(MAX_CLAUSE).last().map_or("", |(at, _)| &text[at..]);
    let mut from = 0;
    for (at, c) in text.char_indices().rev() {
        let after = &text[at + c.len_utf8()..];
        let ends = match c {
            '.' | '!' | '?' | ',' | ':' => after.starts_with(char::is_whitespace),
            '\n' | ';' => true,
            c if c.is_ascii_digit() => return (after, Some(&text[..at])),
            _ => false,
        };
        if ends {
            from = at + c.len_utf8();
            break;
        }
    }
    let clause = &text[from..];
    // "which is", "so that" begin a clause without a comma.
    let begins = ["which", "so", "thus", "hence", "therefore", "then"];
    let start = |at: usize| words(&clause[at..]).next().filter(|word| begins.contains(&lower(word).as_str()));
    let places = clause
        .char_indices()
        .filter(|(at, c)| c.is_alphabetic() && !clause[..*at].ends_with(char::is_alphabetic));
    let last = places.filter_map(|(at, _)| start(at).map(|word| at + word.len())).next_back();
    (&clause[last.unwrap_or(0)..], None)
}

fn denies(word: &str) -> bool {
    DENYING.contains(&word) || word.ends_with("n't")
}

/// Whether a word may change, deny or label a value.
fn special(word: &str) -> bool {
    denies(word) || CHANGING.contains(&word) || LABELS.contains(&word) || FUNCTIONS.contains(&word)
}

/// Runs of letters and apostrophes.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphabetic() || c == '\'' || c == '\u{2019}')).filter(|word| !word.is_empty())
}

fn lower(word: &str) -> String {
    word.to_lowercase().replace('\u{2019}', "'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clause_states_its_number_or_does_not() {
        for before in
            ["she has ", "Not even, so it is ", "the ones who do not like it are ", "it adds up to "]
        {
            assert!(states(before, " apples."), "{before:?}");
        }
        for before in
            ["it is not ", "13, one less than ", "1 in ", "neither 3 nor ", "the square of ", "See Step "]
        {
            assert!(!states(before, "."), "{before:?}");
        }
        assert!(!states("n is ", " but it fails.") && !states("n is ", " or more"));
    }

    #[test]
    fn only_neutral_words_introduce_a_value() {
        assert!(
            introduces(["the", "total", "is"])
                && !introduces(["twice"])
                && !introduces(["the", "square", "of"])
        );
        assert!(tells("that Janet has") && !tells("that Step"));
    }
}
