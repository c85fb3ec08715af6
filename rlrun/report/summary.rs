//! The last thing a run shows: what it achieved and what to do next.
//!
//! Invariant: text of a model is shown with its control characters escaped, since a terminal would obey them. Nothing of
//! a task takes more than a line.

use std::fmt;
use std::path::PathBuf;

/// The result of a finished run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Held-out accuracy before the first step, 0 to 1.
    pub accuracy_before: Option<f64>,
    /// Held-out accuracy after the last step, 0 to 1.
    pub accuracy_after: Option<f64>,
    /// Training steps behind the policy.
    pub steps: u64,
    /// Seconds that the run took.
    pub time_s: f64,
    /// Mean reward of every step, in their order.
    pub rewards: Vec<f64>,
    /// Where everything is.
    pub run_dir: PathBuf,
    /// The same tasks, answered before and after training.
    pub samples: Vec<SamplePair>,
}

/// One task answered before and after training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplePair {
    /// The task.
    pub prompt: String,
    /// Completion of the policy that training started from.
    pub before: String,
    /// Completion of the trained policy.
    pub after: String,
}

/// Characters of a line, if the format does not say how many.
const USUAL_WIDTH: usize = 80;
/// Most characters of a prompt in a command to go on with.
const PROMPT_WIDTH: usize = 40;

/// The width of the format is that of the terminal, such as `{summary:80}`.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Three columns and the spaces between them.
        let width = ((f.width().unwrap_or(USUAL_WIDTH).saturating_sub(4)) / 3).clamp(12, 30);
        writeln!(f)?;
        if !self.samples.is_empty() {
            writeln!(f, "{:width$}  {:width$}  after", "task", "before")?;
        }
        for SamplePair { prompt, before, after } in &self.samples {
            let [prompt, before, after] = [prompt, before, after].map(|text| cell(text, width));
            writeln!(f, "{prompt:width$}  {before:width$}  {after}")?;
        }
        if !self.samples.is_empty() {
            writeln!(f)?;
        }
        if let (Some(before), Some(after)) = (self.accuracy_before, self.accuracy_after) {
            writeln!(f, "accuracy {before:.3} -> {after:.3} in {} steps, {:.0} s", self.steps, self.time_s)?;
        } else {
            writeln!(f, "{} steps, {:.0} s", self.steps, self.time_s)?;
        }
        if let Some((curve, from, to)) = curve(&self.rewards) {
            writeln!(f, "reward   {from:.3} -> {to:.3}  {curve}")?;
        }
        let run = shell_quoted(&self.run_dir.display().to_string());
        let prompt = self.samples.first().map(|pair| shell_quoted(&one_line(&pair.prompt)));
        let prompt = prompt.unwrap_or_else(|| "'PROMPT'".to_owned());
        writeln!(f, "everything is in {run}; next:")?;
        writeln!(f, "  rlrun generate {run} {prompt}")?;
        writeln!(f, "  rlrun generate {run} --interactive")?;
        writeln!(f, "  rlrun export {run} --out DIR")?;
        write!(f, "  rlrun resume {run} --set trainer.steps={}", self.steps.saturating_mul(2))
    }
}

/// Columns of a curve.
const CURVE_WIDTH: usize = 40;

/// `values` as a curve of one line, and the means of its first and last column; `None` for less than two values. Values that are not
/// finite are left out.
pub(crate) fn curve(values: &[f64]) -> Option<(String, f64, f64)> {
    const LEVELS: [char; 8] =
        ['\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}', '\u{2588}'];
    let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    let columns = values.len().min(CURVE_WIDTH);
    if columns < 2 {
        return None;
    }
    let column = |n: usize| {
        let part = &values[n * values.len() / columns..(n + 1) * values.len() / columns];
        part.iter().sum::<f64>() / part.len() as f64
    };
    let means: Vec<f64> = (0..columns).map(column).collect();
    let (least, most) =
        means.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), v| (l.min(*v), m.max(*v)));
    let level = |mean: &f64| {
        let share = if most > least { (mean - least) / (most - least) } else { 0.5 };
        LEVELS[((share * LEVELS.len() as f64) as usize).min(LEVELS.len() - 1)]
    };
    Some((means.iter().map(level).collect(), means[0], means[columns - 1]))
}

/// A text as one cell: control characters escaped, the middle of a long one left out, since ends hold the answers.
fn cell(text: &str, width: usize) -> String {
    let shown: Vec<char> = text.chars().flat_map(escaped).collect();
    if shown.len() <= width {
        return shown.into_iter().collect();
    }
    let head = width / 2;
    let tail = width - head - 2;
    shown[..head]
        .iter()
        .copied()
        .chain("..".chars())
        .chain(shown[shown.len() - tail..].iter().copied())
        .collect()
}

/// A prompt that can be typed: its beginning, up to a word, where it is long or has several lines.
fn one_line(prompt: &str) -> String {
    let prompt = prompt.trim();
    let line = prompt.lines().next().unwrap_or_default().trim_end();
    if line.chars().count() <= PROMPT_WIDTH {
        return if line.len() == prompt.len() { line.to_owned() } else { format!("{line} ...") };
    }
    let start: String = line.chars().take(PROMPT_WIDTH).collect();
    let words = start.rfind(char::is_whitespace).map_or(&start[..], |end| start[..end].trim_end());
    format!("{words} ...")
}

fn escaped(c: char) -> Box<dyn Iterator<Item = char>> {
    if c.is_control() { Box::new(c.escape_default()) } else { Box::new(std::iter::once(c)) }
}

/// The text as one word of a POSIX shell.
fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=+:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    let shown: String = text.chars().flat_map(escaped).collect();
    format!("'{}'", shown.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_tells_the_result_and_the_next_commands() {
        let pair = SamplePair { prompt: "37+48=".into(), before: "75".into(), after: "85\u{1b}[2J\n".into() };
        let summary = Summary {
            accuracy_before: Some(0.3),
            accuracy_after: Some(0.95),
            steps: 60,
            time_s: 61.7,
            rewards: vec![0.25, f64::NAN, 0.5, 0.75, 1.0],
            run_dir: "outputs/my run".into(),
            samples: vec![pair],
        };
        let expected = "
task                            before                          after
37+48=                          75                              85\\u{1b}[2J\\n

accuracy 0.300 -> 0.950 in 60 steps, 62 s
reward   0.250 -> 1.000  \u{2581}\u{2583}\u{2586}\u{2588}
everything is in 'outputs/my run'; next:
  rlrun generate 'outputs/my run' 37+48=
  rlrun generate 'outputs/my run' --interactive
  rlrun export 'outputs/my run' --out DIR
  rlrun resume 'outputs/my run' --set trainer.steps=120";
        assert_eq!(format!("{summary:100}"), expected);
    }

    #[test]
    fn a_long_prompt_is_one_short_line_of_the_commands() {
        assert_eq!(one_line("37+48="), "37+48=");
        assert_eq!(one_line("  What is 1+1?\n"), "What is 1+1?");
        assert_eq!(one_line("Solve:\n\n  x = 1\n"), "Solve: ...");
        assert_eq!(
            one_line("Natalia sold clips to 48 of her friends in April, and then she sold half as many."),
            "Natalia sold clips to 48 of her friends ..."
        );
        assert_eq!(one_line(&"x".repeat(50)), format!("{} ...", "x".repeat(40)));
        assert_eq!(one_line(""), "");
        let prompt = "Question: a\nb\nc\nd\nAnswer: ".to_owned();
        let samples = vec![SamplePair { prompt, before: String::new(), after: String::new() }];
        let shown = Summary { samples, run_dir: "r".into(), ..Summary::default() }.to_string();
        assert!(shown.contains("\n  rlrun generate r 'Question: a ...'\n"), "{shown}");
    }

    #[test]
    fn curves_have_a_column_for_every_part_of_the_run() {
        assert_eq!(curve(&[1.0]), None);
        assert_eq!(curve(&[0.5, 0.5]), Some(("\u{2585}\u{2585}".to_owned(), 0.5, 0.5)));
        let (shown, from, to) = curve(&(0..400).map(f64::from).collect::<Vec<_>>()).unwrap();
        assert_eq!((shown.chars().count(), from, to), (CURVE_WIDTH, 4.5, 394.5));
        assert!(shown.starts_with('\u{2581}') && shown.ends_with('\u{2588}'), "{shown}");
    }

    #[test]
    fn long_texts_keep_both_ends() {
        let text = format!("{}{}", "a".repeat(50), "#### 18");
        assert_eq!(cell(&text, 30), "aaaaaaaaaaaaaaa..aaaaaa#### 18");
        assert_eq!(shell_quoted("it's"), "'it'\\''s'");
    }
}
