//! How many answers the math grader judges in a second on one core, and how long the worst of hostile inputs take.
//!
//! `cargo run --release -p rlrun-rewards --example grade_speed`

use std::hint::black_box;
use std::time::Instant;

use rewards::math::grade;

/// Completions as models write them, about as long as solutions of grade-school problems.
fn completions() -> Vec<(String, String)> {
    let endings = [
        "So the total is \\boxed{N}.",
        "#### N",
        "The answer is N.",
        "**Final Answer:** $N",
        "Therefore, she needs $\\boxed{N \\text{ dollars}}$.",
        "So she sold **N** clips in total.",
        "The final answer is \\boxed{\\$N.00}.",
        "\\[ \\boxed{N} \\]",
    ];
    let work = "Natalia sold 48/2 = 24 clips in May. She sold 48+24 = 72 clips altogether in April and May. "
        .repeat(4);
    (0..4096usize)
        .map(|at| {
            let number = (at * 7919 % 100_000).to_string();
            (
                format!("work\n#### {number}"),
                format!("{work}{}", endings[at % endings.len()].replace('N', &number)),
            )
        })
        .collect()
}

/// Inputs made to be slow or to overflow.
fn hostile() -> Vec<(&'static str, String, String)> {
    let boxed = |text: &str| format!("\\boxed{{{text}}}");
    let nested =
        |open: &str, close: &str, depth: usize| format!("{}x{}", open.repeat(depth), close.repeat(depth));
    let list = |n: usize| (0..n).map(|k| format!("\\sqrt{{{}}}", k + 2)).collect::<Vec<_>>().join(", ");
    let polynomial =
        |n: usize| (0..n).map(|k| format!("(x_{k}+\\sqrt{{y+{k}}})^{{{k}}}")).collect::<String>();
    let matrix = format!("\\begin{{pmatrix}}{}\\end{{pmatrix}}", ["1&2&3&4&5&6&7&8&9&x"; 10].join("\\\\"));
    let pair = |name, text: String| (name, text.clone(), boxed(&text));
    vec![
        ("tower of powers", "9^{9^{9^{9}}}".into(), boxed("9^{9^{9^{8}}}")),
        ("great factorial", "10000000!".into(), boxed("9999999!+1")),
        ("great power", "(1+10^{-400})^{10^9}".into(), boxed("2^{4096}")),
        ("long number", "7".repeat(390), boxed(&"7".repeat(389))),
        ("deep fractions", nested("\\frac{1}{", "}", 500), boxed(&nested("\\frac{1}{1+", "}", 500))),
        ("deep parentheses", nested("(", ")", 2000), boxed(&nested("(", ")", 1999))),
        ("deep but legal", nested("\\sqrt{1+", "}", 9), boxed(&nested("\\sqrt{2+", "}", 9))),
        ("long list", list(64), boxed(&list(63))),
        ("equal list, reversed", list(60), boxed(&list(60).rsplit(", ").collect::<Vec<_>>().join(", "))),
        ("many factors", polynomial(40), boxed(&format!("{}+0\\cdot z", polynomial(40)))),
        (
            "matrix products",
            format!("{matrix}{matrix}{matrix}"),
            boxed(&format!("{matrix}{matrix}{matrix}+0{matrix}")),
        ),
        ("double integral", "\\int_0^1 \\int_0^1 e^{xy} dx dy".into(), boxed("1.3179")),
        ("hard integral", "\\int_0^{\\infty} \\frac{\\sin x}{x} dx".into(), boxed("\\frac{\\pi}{2}")),
        ("long series", "\\sum_{n=1}^{\\infty} \\frac{1}{n}".into(), boxed("\\infty")),
        ("nested series", "\\sum_{a=1}^{200} \\sum_{b=1}^{200} ab".into(), boxed("404010000")),
        ("curves", "x^4+y^4+\\sin(xy)=1".into(), boxed("x^4+y^4+\\cos(xy)=1")),
        ("open boxes", "5".into(), "\\boxed{".repeat(20_000)),
        ("dollars", "5".into(), "$".repeat(100_000)),
        ("answers", "5".into(), "answer is ".repeat(20_000)),
        ("digits and commas", "5".into(), "1,".repeat(50_000)),
        ("backslashes", "5".into(), "\\".repeat(100_000)),
        pair("bars", "|".repeat(1000)),
        pair("signs", "+-".repeat(500)),
        pair("scripts", "x_".repeat(500)),
        pair("exponents", "2^".repeat(500) + "2"),
        pair("unions", vec!["(0,1)"; 100].join("\\cup")),
        pair("differences", vec!["\\mathbb{R}"; 30].join("\\setminus")),
    ]
}

fn main() {
    let completions = completions();
    let mut right = 0usize;
    let rounds = 50;
    let start = Instant::now();
    for _ in 0..rounds {
        for (gold, completion) in &completions {
            right +=
                usize::from(grade(black_box(gold), black_box(completion), false, true).equal == Some(true));
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let grades = rounds * completions.len();
    #[expect(clippy::cast_precision_loss, reason = "a rate to print")]
    let rate = grades as f64 / seconds;
    eprintln!("{rate:.0} grades/s of {} bytes, {right} of {grades} right", completions[0].1.len());
    let mut times: Vec<(f64, &str, Option<bool>)> = hostile()
        .iter()
        .map(|(name, gold, completion)| {
            let once = || {
                let start = Instant::now();
                let verdict = grade(black_box(gold), black_box(completion), false, true);
                (start.elapsed().as_secs_f64() * 1e3, verdict.equal)
            };
            let (milliseconds, equal) =
                (0..3).map(|_| once()).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_else(once);
            (milliseconds, *name, equal)
        })
        .collect();
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (milliseconds, name, equal) in times {
        eprintln!("{milliseconds:9.3} ms  {name} ({equal:?})");
    }
}
