//! Event files of TensorBoard: a record for every step, in `tensorboard/` of the run directory.
//!
//! A record is its length, a masked CRC-32C of the length, an `Event`, and a masked CRC-32C of the event
//! (tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, tensorboard/compat/proto/summary.proto).
//!
//! Invariant: files are only appended to. A run that repeats steps says so with a session start, after which TensorBoard leaves
//! out what older files have of these steps.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::encoding::{CRC32C, ProtobufMessage};

/// Buckets of a histogram.
const BUCKETS: usize = 30;
/// `DataType` of tensors (tensorflow/core/framework/types.proto).
const DOUBLE: u64 = 2;
const STRING: u64 = 7;
/// `SessionLog.START`.
const START: u64 = 1;

/// An event file that is being written.
#[derive(Debug)]
pub(super) struct EventFile {
    file: File,
}

/// The values of one step.
#[derive(Debug, Default)]
pub(super) struct EventSummary {
    values: ProtobufMessage,
}

impl EventFile {
    /// Makes a new file in `directory` for the steps from `first` on.
    pub(super) fn create(directory: &Path, first: u64) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let (seconds, process) = (seconds_now() as u64, std::process::id());
        // TensorBoard reads files of a directory in the order of their names.
        let path = directory.join(format!("events.out.tfevents.{seconds:010}.rlrun.{process}.{first}"));
        let mut file = Self { file: File::options().create_new(true).append(true).open(path)? };
        file.record(&event(0).text(3, "brain.Event:2"))?;
        file.record(&event(first).message(7, &ProtobufMessage::default().number(1, START)))?;
        Ok(file)
    }

    /// Appends the values of `step`.
    pub(super) fn append(&mut self, step: u64, summary: &EventSummary) -> io::Result<()> {
        self.record(&event(step).message(5, &summary.values))
    }

    fn record(&mut self, event: &ProtobufMessage) -> io::Result<()> {
        let data = event.clone().into_bytes();
        let length = (data.len() as u64).to_le_bytes();
        let (of_length, of_data) = (masked(&length), masked(&data));
        self.file.write_all(&[&length[..], &of_length, &data, &of_data].concat())
    }
}

impl EventSummary {
    pub(super) fn scalar(&mut self, tag: &str, value: f64) {
        let value = ProtobufMessage::default().text(1, tag).float(2, value as f32);
        self.values = std::mem::take(&mut self.values).message(1, &value);
    }

    /// A text, as Markdown.
    pub(super) fn text(&mut self, tag: &str, text: &str) {
        let tensor = ProtobufMessage::default().number(1, STRING).message(2, &shape(&[1])).text(8, text);
        self.tensor(tag, "text", &tensor);
    }

    /// The distribution of `values [N]`; nothing if there are none. Values that are not finite are left out.
    pub(super) fn histogram(&mut self, tag: &str, values: &[f64]) {
        self.counted(tag, &buckets(values));
    }

    /// A distribution of which `rows [K, 3]` are left end, right end and count of its buckets; nothing if there are none.
    pub(super) fn counted(&mut self, tag: &str, rows: &[[f64; 3]]) {
        if rows.is_empty() {
            return;
        }
        let content: Vec<u8> = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = ProtobufMessage::default()
            .number(1, DOUBLE)
            .message(2, &shape(&[rows.len() as u64, 3]))
            .data(4, &content);
        self.tensor(tag, "histograms", &tensor);
    }

    fn tensor(&mut self, tag: &str, plugin: &str, tensor: &ProtobufMessage) {
        let plugin = ProtobufMessage::default().message(1, &ProtobufMessage::default().text(1, plugin));
        let value = ProtobufMessage::default().text(1, tag).message(8, tensor).message(9, &plugin);
        self.values = std::mem::take(&mut self.values).message(1, &value);
    }
}

fn event(step: u64) -> ProtobufMessage {
    ProtobufMessage::default().double(1, seconds_now()).number(2, step)
}

fn shape(sizes: &[u64]) -> ProtobufMessage {
    let add =
        |shape: ProtobufMessage, size: &u64| shape.message(2, &ProtobufMessage::default().number(1, *size));
    sizes.iter().fold(ProtobufMessage::default(), add)
}

/// `[K, 3]` left end, right end and count of buckets of equal width from the least to the greatest of `values [N]`; one bucket if all
/// are equal.
fn buckets(values: &[f64]) -> Vec<[f64; 3]> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (least, greatest) =
        finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, g), value| (l.min(value), g.max(value)));
    if least > greatest {
        return Vec::new();
    }
    if least == greatest {
        return vec![[least, greatest, finite().count() as f64]];
    }
    let width = (greatest - least) / BUCKETS as f64;
    let edge = |n: usize| if n == BUCKETS { greatest } else { least + n as f64 * width };
    let mut rows: Vec<[f64; 3]> = (0..BUCKETS).map(|n| [edge(n), edge(n + 1), 0.0]).collect();
    for value in finite() {
        rows[(((value - least) / width) as usize).min(BUCKETS - 1)][2] += 1.0;
    }
    rows
}

fn masked(data: &[u8]) -> [u8; 4] {
    CRC32C.of(&[data]).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// Seconds since 1970.
fn seconds_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_every_finite_value() {
        let values = [3.0, 1.0, f64::NAN, 2.0, 1.0, f64::INFINITY];
        let rows = buckets(&values);
        assert_eq!(rows.len(), BUCKETS);
        assert_eq!((rows[0][0], rows[BUCKETS - 1][1]), (1.0, 3.0));
        assert_eq!(rows.iter().map(|row| row[2]).sum::<f64>(), 4.0);
        assert_eq!((rows[0][2], rows[BUCKETS - 1][2]), (2.0, 1.0));
        assert_eq!(buckets(&[0.5, 0.5]), [[0.5, 0.5, 2.0]]);
        assert!(buckets(&[f64::NAN]).is_empty());
    }

    #[test]
    fn records_have_their_length_and_checksums() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(directory.path(), 3).unwrap();
        let mut summary = EventSummary::default();
        summary.scalar("reward/mean", 0.5);
        summary.histogram("rewards", &[0.0, 1.0]);
        summary.text("samples", "*a*");
        file.append(4, &summary).unwrap();
        let path = directory.path().read_dir().unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(path).unwrap();
        let (mut rest, mut records) = (&bytes[..], 0);
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked(&rest[..8]));
            assert_eq!(rest[12 + length..16 + length], masked(&rest[12..12 + length]));
            (rest, records) = (&rest[16 + length..], records + 1);
        }
        assert_eq!(records, 3, "version, session start, step");
    }
}
