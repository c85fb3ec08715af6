//! Offline runs of Weights & Biases: what `wandb sync` uploads, in `wandb/` of the run directory.
//!
//! A file is a log of LevelDB with another header and a CRC-32: blocks of 32 KiB, chunks with checksum, length and type. A record is
//! a message `Record` of wandb/proto/wandb_internal.proto.
//!
//! Invariant: the file is only appended to; a torn end costs the last record. Without an exit record the run counts as crashed.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use serde_json::{Map, Value};

use super::encoding::{CRC32, ProtobufMessage};

/// Size of a block, bytes.
const BLOCK: usize = 32 * 1024;
/// Checksum, length and type of a chunk, bytes.
const CHUNK_HEADER: usize = 7;
/// `:W&B`, a magic number and the version of the format.
const FILE_HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];

/// An offline run that is being written.
#[derive(Debug)]
pub(super) struct OfflineRun {
    directory: PathBuf,
    file: File,
    /// Bytes written.
    written: usize,
    /// Number of the last record.
    records: u64,
    /// The last value of every metric.
    summary: Map<String, Value>,
    started: u64,
}

impl OfflineRun {
    /// Makes a run with the id that belongs to `directory`, so that the parts of a resumed run are one run.
    pub(super) fn create(directory: &Path, name: &str, config: &Map<String, Value>) -> io::Result<Self> {
        let started = seconds_now();
        let id = run_id(directory);
        let named = |second| {
            let run = format!("offline-run-{}-{id}", date_and_time(second));
            directory.join("wandb").join(run)
        };
        // A run that is resumed at once has the name of the next second.
        let mut second = started;
        while named(second).exists() {
            second += 1;
        }
        let run = named(second);
        for part in ["files", "logs"] {
            std::fs::create_dir_all(run.join(part))?;
        }
        let mut file =
            File::options().create_new(true).append(true).open(run.join(format!("run-{id}.wandb")))?;
        file.write_all(&FILE_HEADER)?;
        let (written, summary) = (FILE_HEADER.len(), Map::new());
        let mut offline = Self { directory: run, file, written, records: 0, summary, started };
        let versions = ProtobufMessage::default().text(1, "0.31.0").text(2, "0.70.0");
        offline.record(21, &ProtobufMessage::default().message(1, &versions))?;
        // W&B wants a config of its own, which may be empty.
        let own = ProtobufMessage::default().text(1, "_wandb").text(16, "{}");
        let add = |config: ProtobufMessage, (key, value): (&String, &Value)| {
            config.message(1, &ProtobufMessage::default().text(1, key).text(16, &value.to_string()))
        };
        let config = config.iter().fold(ProtobufMessage::default().message(1, &own), add);
        let begun = ProtobufMessage::default().number(1, started);
        let described = ProtobufMessage::default().text(1, &id).text(3, "rlrun").message(4, &config);
        offline.record(17, &described.text(8, name).message(17, &begun))?;
        Ok(offline)
    }

    /// Where it is.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Appends the metrics of a step.
    pub(super) fn append<'a>(
        &mut self,
        step: u64,
        metrics: impl Iterator<Item = (&'a str, f64)>,
    ) -> io::Result<()> {
        let now = seconds_now();
        let mut items: Map<String, Value> =
            metrics.map(|(name, value)| (name.to_owned(), number(value))).collect();
        items.insert("_step".to_owned(), step.into());
        items.insert("_timestamp".to_owned(), now.into());
        items.insert("_runtime".to_owned(), now.saturating_sub(self.started).into());
        let history =
            items.iter().fold(ProtobufMessage::default(), |history, item| history.message(1, &keyed(item)));
        self.record(2, &history.message(2, &ProtobufMessage::default().number(1, step)))?;
        self.summary.extend(items);
        Ok(())
    }

    fn finish(&mut self, exit_code: u64) -> io::Result<()> {
        let add = |summary: ProtobufMessage, item| summary.message(1, &keyed(item));
        let summary = self.summary.iter().fold(ProtobufMessage::default(), add);
        self.record(3, &summary)?;
        let runtime = seconds_now().saturating_sub(self.started);
        self.record(18, &ProtobufMessage::default().number(1, exit_code).number(2, runtime))
    }

    fn record(&mut self, field: u32, content: &ProtobufMessage) -> io::Result<()> {
        self.records += 1;
        let record = ProtobufMessage::default().number(1, self.records).message(field, content).into_bytes();
        let mut out = Vec::with_capacity(record.len() + 2 * CHUNK_HEADER);
        chunks(&record, self.written, &mut out);
        self.file.write_all(&out)?;
        self.written += out.len();
        Ok(())
    }
}

impl Drop for OfflineRun {
    fn drop(&mut self) {
        // What is missing then is the end of the run, which W&B calls crashed.
        let _ = self.finish(u64::from(std::thread::panicking()));
    }
}

/// A metric in a history or a summary: `nested_key` has one part, slashes included.
fn keyed((key, value): (&String, &Value)) -> ProtobufMessage {
    ProtobufMessage::default().text(2, key).text(16, &value.to_string())
}

/// A number; those that JSON does not have as their names.
fn number(value: f64) -> Value {
    match value {
        _ if value.is_nan() => "NaN".into(),
        _ if value == f64::INFINITY => "Infinity".into(),
        _ if value == f64::NEG_INFINITY => "-Infinity".into(),
        _ => value.into(),
    }
}

/// Writes `record` as chunks behind `written` bytes of a file.
fn chunks(mut record: &[u8], written: usize, out: &mut Vec<u8>) {
    let mut first = true;
    loop {
        let mut left = BLOCK - (written + out.len()) % BLOCK;
        if left < CHUNK_HEADER {
            out.resize(out.len() + left, 0);
            left = BLOCK;
        }
        let (chunk, rest) = record.split_at(record.len().min(left - CHUNK_HEADER));
        let last = rest.is_empty();
        // Whole, first, middle and last part.
        let kind = match (first, last) {
            (true, true) => 1_u8,
            (true, false) => 2,
            (false, false) => 3,
            (false, true) => 4,
        };
        out.extend(CRC32.of(&[&[kind], chunk]).to_le_bytes());
        out.extend((chunk.len() as u16).to_le_bytes());
        out.push(kind);
        out.extend(chunk);
        if last {
            return;
        }
        (record, first) = (rest, false);
    }
}

/// Eight letters and digits that a run directory keeps.
fn run_id(directory: &Path) -> String {
    let path = directory.canonicalize().unwrap_or_else(|_| directory.to_path_buf());
    let hash = blake3::hash(path.as_os_str().as_encoded_bytes());
    let letters = b"abcdefghijklmnopqrstuvwxyz0123456789";
    hash.as_bytes()[..8].iter().map(|byte| char::from(letters[usize::from(*byte) % letters.len()])).collect()
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// `YYYYMMDD_HHMMSS` of `seconds` since 1970, in UTC.
fn date_and_time(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.unwrap_or_default().format("%Y%m%d_%H%M%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date_and_time(0), "19700101_000000");
        assert_eq!(date_and_time(951_827_696), "20000229_123456");
        assert_eq!(date_and_time(1_795_651_199), "20261125_235959");
    }

    #[test]
    fn chunks_end_at_blocks_and_join_to_the_record() {
        for written in [7, BLOCK - 3, BLOCK - 7, BLOCK - 8, 5 * BLOCK] {
            let record: Vec<u8> = (0..3 * BLOCK + 11).map(|n| n as u8).collect();
            let mut out = Vec::new();
            chunks(&record, written, &mut out);
            let (mut joined, mut kinds, mut at) = (Vec::<u8>::new(), Vec::new(), 0);
            while at < out.len() {
                let left = BLOCK - (written + at) % BLOCK;
                if left < CHUNK_HEADER {
                    assert!(out[at..at + left].iter().all(|byte| *byte == 0));
                    at += left;
                    continue;
                }
                let length = usize::from(u16::from_le_bytes([out[at + 4], out[at + 5]]));
                assert!(CHUNK_HEADER + length <= left, "a chunk is in one block");
                let chunk = &out[at + CHUNK_HEADER..][..length];
                assert_eq!(out[at..at + 4], CRC32.of(&[&out[at + 6..at + 7], chunk]).to_le_bytes());
                kinds.push(out[at + 6]);
                joined.extend(chunk);
                at += CHUNK_HEADER + length;
            }
            assert_eq!(joined, record);
            assert_eq!((kinds[0], kinds[kinds.len() - 1]), (2, 4));
        }
    }
}
