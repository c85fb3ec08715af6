//! What happened in a run: the lines of `events.jsonl`, and the remarks in `metrics.jsonl`.
//!
//! Invariant: the last [`MAX_ENTRIES`] of each are kept, each within [`MAX_ENTRY_BYTES`].

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

use crate::lines::LineSink;

/// Most events, and most remarks, that are kept.
const MAX_ENTRIES: usize = 2000;
/// Longest event or remark, bytes of its text.
const MAX_ENTRY_BYTES: usize = 8 << 10;

/// The end of a run, as its last event says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastEvent {
    /// There is no event.
    None,
    /// It started or was resumed, and has not ended.
    Open,
    /// All its steps are done.
    Done,
    /// It was stopped and can be resumed.
    Stopped,
}

impl LastEvent {
    /// What an event says of the run; `None` for one that says nothing of its start or end.
    pub(crate) fn of(event: &Map<String, Value>) -> Option<Self> {
        let done = || event.get("fields").and_then(|fields| fields.get("done")) == Some(&Value::Bool(true));
        match event.get("event")?.as_str()? {
            "start" | "resume" => Some(Self::Open),
            "end" if done() => Some(Self::Done),
            "end" => Some(Self::Stopped),
            _ => None,
        }
    }
}

/// Events and remarks of a run.
#[derive(Debug)]
pub(crate) struct RunHistory {
    events: VecDeque<Value>,
    remarks: VecDeque<(f64, String)>,
    /// Steps of the last line with measurements.
    measured: f64,
    last: LastEvent,
    /// Entries that were left out because newer ones came.
    dropped: u64,
}

impl Default for RunHistory {
    fn default() -> Self {
        Self {
            events: VecDeque::new(),
            remarks: VecDeque::new(),
            measured: 0.0,
            last: LastEvent::None,
            dropped: 0,
        }
    }
}

impl RunHistory {
    /// What the last event says of the run.
    pub(crate) fn last(&self) -> LastEvent {
        self.last
    }

    /// The remark of the last step that has one, and its step; `None` if a later step has none.
    pub(crate) fn current_remark(&self) -> Option<&str> {
        self.remarks.back().filter(|(step, _)| *step >= self.measured).map(|(_, text)| text.as_str())
    }

    /// The last `limit_entries` remarks and events, oldest first.
    pub(crate) fn entries(&self, limit_entries: usize) -> Value {
        let skip = |length: usize| length.saturating_sub(limit_entries);
        let events: Vec<&Value> = self.events.iter().skip(skip(self.events.len())).collect();
        let remarks: Vec<Value> = self
            .remarks
            .iter()
            .skip(skip(self.remarks.len()))
            .map(|(step, text)| json!({ "step": step, "text": text }))
            .collect();
        let left_out = self.dropped + (skip(self.events.len()) + skip(self.remarks.len())) as u64;
        json!({ "events": events, "remarks": remarks, "left_out": left_out })
    }

    pub(crate) fn remark(&mut self, step: f64, text: &str) {
        self.remarks.push_back((step, cut(text, MAX_ENTRY_BYTES).to_owned()));
        if self.remarks.len() > MAX_ENTRIES {
            self.remarks.pop_front();
            self.dropped += 1;
        }
    }

    pub(crate) fn measured(&mut self, step: f64) {
        self.measured = step;
    }

    pub(crate) fn forget_remarks(&mut self) {
        self.remarks.clear();
        self.measured = 0.0;
    }
}

impl LineSink for RunHistory {
    fn restart(&mut self) {
        self.events.clear();
        self.last = LastEvent::None;
    }

    fn line(&mut self, line: &[u8]) {
        let Ok(event) = serde_json::from_slice::<Map<String, Value>>(line) else { return };
        let Some(name) = event.get("event").and_then(Value::as_str) else { return };
        self.last = LastEvent::of(&event).unwrap_or(self.last);
        let event = if line.len() <= MAX_ENTRY_BYTES {
            Value::Object(event)
        } else {
            let text = String::from_utf8_lossy(&line[..MAX_ENTRY_BYTES]);
            json!({ "event": cut(name, MAX_ENTRY_BYTES), "cut": text })
        };
        self.events.push_back(event);
        if self.events.len() > MAX_ENTRIES {
            self.events.pop_front();
            self.dropped += 1;
        }
    }
}

/// The start of `text`, at most `bytes` long and ending between two characters.
pub(crate) fn cut(text: &str, bytes: usize) -> &str {
    if text.len() <= bytes {
        return text;
    }
    let end = (0..=bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_event_and_the_last_remark_describe_the_run() {
        let mut history = RunHistory::default();
        assert_eq!((history.last(), history.current_remark()), (LastEvent::None, None));
        history.line(br#"{"event":"start","fields":{"version":0}}"#);
        history.remark(3.0, "sampling: the trainer waits");
        history.measured(3.0);
        assert_eq!(history.last(), LastEvent::Open);
        assert_eq!(history.current_remark(), Some("sampling: the trainer waits"));
        history.measured(4.0);
        assert_eq!(history.current_remark(), None);
        history.line(br#"{"event":"end","fields":{"done":false}}"#);
        assert_eq!(history.last(), LastEvent::Stopped);
        history.line(b"no json");
        history.line(br#"{"event":"end","fields":{"done":true}}"#);
        assert_eq!(history.last(), LastEvent::Done);
        assert_eq!(history.entries(2)["events"].as_array().unwrap().len(), 2);
        assert_eq!(history.entries(2)["left_out"], 1);
    }

    #[test]
    fn entries_have_limits() {
        let mut history = RunHistory::default();
        for index in 0..MAX_ENTRIES + 3 {
            history.line(format!(r#"{{"event":"e","fields":{index}}}"#).as_bytes());
        }
        let long = format!(r#"{{"event":"long","fields":"{}"}}"#, "x".repeat(MAX_ENTRY_BYTES));
        history.line(long.as_bytes());
        let entries = history.entries(usize::MAX);
        assert_eq!(entries["events"].as_array().unwrap().len(), MAX_ENTRIES);
        assert_eq!(entries["left_out"], 4);
        assert_eq!(entries["events"][MAX_ENTRIES - 1]["event"], "long");
        assert_eq!(cut("a\u{e4}b", 2), "a");
    }
}
