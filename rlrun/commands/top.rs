//! `rlrun top`: the state of a run in the terminal: its roles, its last steps, and what limits it.
//!
//! Invariant: it reads files and takes no lock. Of a file it reads at most [`MAX_READ`] bytes at a time, and keeps [`CURVE`] steps.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};

use crate::args::TopArgs;
use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::report::{TableLayout, curve, plain, wrapped};
use crate::runs::RunState;
use crate::signals::Signals;

/// Time between two pictures.
const EVERY: Duration = Duration::from_secs(1);
/// Most bytes of a file that are read at a time.
const MAX_READ: u64 = 4 << 20;
/// Most steps of a curve.
const CURVE: usize = 100_000;
/// Steps in the table.
const ROWS: usize = 10;
/// Most roles that are shown.
const ROLES: usize = 12;
/// Cells of a bar.
const BAR: usize = 30;
/// Time without a new line after which a run without an end is called quiet.
const QUIET: Duration = Duration::from_secs(600);
/// The metrics that are shown as curves.
const CURVES: [(&str, &str); 4] = [
    ("reward", "reward/mean"),
    ("accuracy", "eval/accuracy"),
    ("entropy", "entropy/mean"),
    ("staleness", "staleness/mean"),
];

/// Shows the run until a signal stops it, or once.
pub(super) fn top(args: &TopArgs) -> Result<String, Failure> {
    let is_run = ["metrics.jsonl", "resolved.toml"].iter().any(|name| args.run.join(name).is_file());
    if !is_run {
        let what = format!(
            "`{}` is no run directory: it has neither `metrics.jsonl` nor `resolved.toml`",
            args.run.display()
        );
        return Err(Failure::NotThere(what));
    }
    let terminal = console::Term::stdout();
    let width = || {
        let of_terminal = || terminal.size_checked().map(|(_, columns)| usize::from(columns));
        args.width.or_else(of_terminal).unwrap_or(80).max(40)
    };
    let mut run = FollowedRun::new(&args.run);
    run.refresh();
    if args.once || !terminal.is_term() || run.has_ended() {
        return Ok(run.picture(width()));
    }
    let signals = Signals::listen_quietly()?;
    let screen = AlternateScreen::enter();
    while !signals.stop_requested() {
        screen.show(&run.picture(width()));
        for _ in 0..10 {
            if !signals.stop_requested() {
                std::thread::sleep(EVERY / 10);
            }
        }
        run.refresh();
    }
    drop(screen);
    Ok(run.picture(width()))
}

/// The other screen of the terminal; dropping it brings back what was there.
struct AlternateScreen;

impl AlternateScreen {
    fn enter() -> Self {
        put("\x1b[?1049h\x1b[?25l");
        Self
    }

    fn show(&self, picture: &str) {
        let mut frame = "\x1b[H".to_owned();
        for line in picture.lines() {
            frame.push_str(line);
            frame.push_str("\x1b[K\r\n");
        }
        frame.push_str("\x1b[J");
        put(&frame);
    }
}

impl Drop for AlternateScreen {
    fn drop(&mut self) {
        put("\x1b[?25h\x1b[?1049l");
    }
}

/// A terminal that is gone ends the command with the next signal.
fn put(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// What was read of a run.
struct FollowedRun {
    root: PathBuf,
    /// Bytes of `metrics.jsonl` that were read; `None` before the first look.
    read: Option<u64>,
    last: VecDeque<Metrics>,
    curves: [Vec<f64>; CURVES.len()],
    status: Value,
    /// Steps that the recipe asks for.
    planned: Option<u64>,
    ended: Option<&'static str>,
}

impl FollowedRun {
    fn new(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
            read: None,
            last: VecDeque::new(),
            curves: Default::default(),
            status: Value::Null,
            planned: dashboard::planned_steps(root),
            ended: None,
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Reads what is new.
    fn refresh(&mut self) {
        if let Ok(text) = self.new_lines() {
            text.lines().for_each(|line| self.take(line));
        }
        let status = model::files::read_text(&self.root.join("status.json"), MAX_READ).ok();
        self.status = status.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null);
        let last = Some(RunState::closed(dashboard::last_event(&self.root)));
        self.ended = last.filter(|state| *state != RunState::Interrupted).map(RunState::as_str);
    }

    /// The whole lines that `metrics.jsonl` has got since the last call; of a long file the last ones.
    fn new_lines(&mut self) -> std::io::Result<String> {
        let mut file = model::files::open(&self.root.join("metrics.jsonl"))?;
        let length = file.metadata()?.len();
        if self.read.is_some_and(|read| length < read) {
            // A resume has removed the steps that it repeats.
            (self.read, self.last) = (None, VecDeque::new());
            self.curves = Default::default();
        }
        let from = self.read.unwrap_or(length.saturating_sub(MAX_READ));
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(MAX_READ).read_to_end(&mut bytes)?;
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        // A line that alone is longer than what is read is left out.
        let end = if end == 0 && bytes.len() as u64 == MAX_READ { bytes.len() } else { end };
        self.read = Some(from + end as u64);
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    fn take(&mut self, line: &str) {
        let Ok(object) = serde_json::from_str::<Map<String, Value>>(line) else { return };
        let mut metrics = Metrics::read(&object);
        let bottleneck = object.get("bottleneck").and_then(Value::as_str);
        bottleneck.unwrap_or_default().clone_into(&mut metrics.bottleneck);
        for (curve, (_, name)) in self.curves.iter_mut().zip(CURVES) {
            curve.extend(metrics.get(name));
            if curve.len() > CURVE {
                curve.drain(..CURVE / 2);
            }
        }
        if metrics.get("step").is_some_and(|step| step > 0.0) {
            self.last.push_back(metrics);
            if self.last.len() > ROWS {
                self.last.pop_front();
            }
        }
    }

    fn state(&self) -> &'static str {
        if let Some(ended) = self.ended {
            return ended;
        }
        let modified = std::fs::metadata(self.root.join("metrics.jsonl")).and_then(|found| found.modified());
        match modified.map(|at| SystemTime::now().duration_since(at).unwrap_or_default()) {
            Err(_) => "no step yet",
            Ok(age) if age > QUIET => "no new lines",
            Ok(_) => "running",
        }
    }

    /// The screen, with lines of at most `width` characters.
    fn picture(&self, width: usize) -> String {
        let mut out = String::new();
        let last = self.last.back();
        let number = |name: &str| last.and_then(|metrics| metrics.get(name));
        let step = number("step").map_or_else(|| "-".to_owned(), |step| format!("{step:.0}"));
        let of = self.planned.map_or_else(String::new, |steps| format!(" of {steps}"));
        let time = number("time_s").map_or_else(String::new, |time| format!(", {time:.0} s"));
        let name = self.root.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let title = format!("{}: {}, step {step}{of}{time}", plain(&name), self.state());
        // Writing into a text cannot fail.
        let _ = writeln!(out, "{}", cut(&title, width));
        for (role, idle, speed) in [
            ("sampler", "rollout/idle_ratio", "rollout/tokens_per_s"),
            ("trainer", "trainer/idle_ratio", "trainer/tokens_per_s"),
        ] {
            let Some(idle) = number(idle) else { continue };
            let busy = (1.0 - idle).clamp(0.0, 1.0);
            let filled = (busy * BAR as f64).round() as usize;
            let bar = "#".repeat(filled) + &".".repeat(BAR - filled);
            let speed = number(speed).unwrap_or_default();
            let line = format!("{role}  [{bar}] {:3.0} % busy, {speed:.0} tokens/s", 100.0 * busy);
            let _ = writeln!(out, "{}", cut(&line, width));
        }
        let buffer = &self.status["buffer"];
        if let Some(slots) = buffer["capacity"].as_u64() {
            let count = |state: &str| buffer[state].as_u64().unwrap_or(0);
            let line = format!(
                "buffer   {} of {slots} slots: {} admitted, {} claimed, {} finalized, {} leased; {} dropped as stale",
                count("admitted") + count("claimed") + count("finalized") + count("leased"),
                count("admitted"),
                count("claimed"),
                count("finalized"),
                count("leased"),
                count("dropped_stale")
            );
            let _ = writeln!(out, "{}", cut(&line, width));
        }
        for (values, (name, _)) in self.curves.iter().zip(CURVES) {
            if let Some((drawn, from, to)) = curve(values) {
                let _ = writeln!(out, "{}", cut(&format!("{name:<9}{from:8.3} -> {to:<8.3} {drawn}"), width));
            }
        }
        if !self.last.is_empty() {
            let layout = TableLayout::fitting(width);
            let _ = writeln!(out, "\n{}", layout.header());
            for metrics in &self.last {
                let _ = writeln!(out, "{}", layout.row(metrics));
            }
        }
        let roles = self.status["roles"].as_array().map(Vec::as_slice).unwrap_or_default();
        let running = self.ended.is_none();
        let roles = roles.iter().filter_map(Value::as_str).filter(|_| running).take(ROLES);
        let limits = last.map(|metrics| metrics.bottleneck.as_str()).filter(|text| !text.is_empty());
        for line in roles.chain(limits) {
            let _ = write!(out, "\n{}", wrapped(&plain(line), width).join("\n  "));
        }
        out
    }
}

/// The first `width` characters.
fn cut(line: &str, width: usize) -> String {
    line.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;

    fn line(step: u64, reward: f64) -> String {
        format!(
            "{{\"step\":{step},\"time_s\":{step},\"reward/mean\":{reward},\"rollout/idle_ratio\":0.25,\
             \"trainer/idle_ratio\":0.5,\"bottleneck\":\"sampling: the trainer waits 50 % of the time\"}}\n"
        )
    }

    #[test]
    fn a_run_is_followed_and_shown_within_the_width() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        std::fs::write(file("resolved.toml"), "[trainer]\nsteps = 40  # recipe\n").unwrap();
        let mut run = FollowedRun::new(directory.path());
        run.refresh();
        assert!(run.picture(80).contains(": no step yet, step - of 40"), "{}", run.picture(80));
        let begun: String =
            (0..20).map(|step| line(step, f64::from(u32::try_from(step).unwrap()) / 20.0)).collect();
        std::fs::write(file("metrics.jsonl"), begun + "{\"step\":20,\"rew").unwrap();
        let status =
            r#"{"roles":["the trainer \u001b[31mwaits"],"buffer":{"capacity":8,"admitted":1,"leased":2}}"#;
        std::fs::write(file("status.json"), status).unwrap();
        run.refresh();
        let shown = run.picture(60);
        assert!(shown.lines().all(|line| line.chars().count() <= 60), "{shown}");
        assert!(!shown.contains('\u{1b}'), "a terminal obeys no file");
        for part in [
            ": running, step 19 of 40, 19 s",
            "sampler  [#######################.......]  75 % busy",
            "buffer   3 of 8 slots: 1 admitted, 0 claimed",
            "reward      0.000 -> 0.950",
            "sampling: the trainer waits 50 % of the time",
        ] {
            assert!(shown.contains(part), "{part} in\n{shown}");
        }
        assert_eq!(run.last.len(), ROWS);
        let mut metrics = File::options().append(true).open(file("metrics.jsonl")).unwrap();
        metrics.write_all(b"ard/mean\":0.5}\n").unwrap();
        std::fs::write(file("events.jsonl"), "{\"event\":\"end\",\"fields\":{\"done\":true}}\n").unwrap();
        run.refresh();
        assert!(run.picture(80).contains(": done, step 20 of 40"), "{}", run.picture(80));
        assert!(!run.picture(80).contains("the trainer "), "an ended run does nothing");
        std::fs::write(file("metrics.jsonl"), line(3, 0.1)).unwrap();
        run.refresh();
        assert_eq!((run.last.len(), run.curves[0].len()), (1, 1), "a resume repeats steps");
    }

    #[test]
    fn what_is_no_run_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let args = TopArgs { run: directory.path().to_path_buf(), once: true, width: None };
        assert!(top(&args).unwrap_err().to_string().contains("is no run directory"));
        std::fs::write(directory.path().join("metrics.jsonl"), line(1, 0.5)).unwrap();
        assert!(top(&args).unwrap().contains("step 1"));
    }
}
