//! What can go wrong with a device.

use std::collections::BTreeMap;
use std::fmt;

/// Results of this crate.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// What went wrong with a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no such device, or it cannot be used.
    #[error("device {device} cannot be used: {reason}")]
    Unavailable {
        /// As it was asked for.
        device: String,
        /// Why, and what helps.
        reason: String,
    },
    /// Its memory is full.
    #[error(
        "device {device} has no memory for {wanted} more of {label}: {free} of {total} are free; the most is held by {held}; {remedy}"
    )]
    OutOfMemory {
        /// Which one.
        device: String,
        /// What was asked for.
        wanted: Bytes,
        /// What it was for.
        label: &'static str,
        /// What is left.
        free: Bytes,
        /// What there is.
        total: Bytes,
        /// The largest consumers of this process.
        held: Held,
        /// What helps.
        remedy: &'static str,
    },
    /// A call of the driver or of a library failed.
    #[error("device {device}: {call} failed: {reason}")]
    Call {
        /// Which one.
        device: String,
        /// What was called.
        call: &'static str,
        /// What it says.
        reason: String,
    },
    /// The kernels cannot be compiled.
    #[error("device {device}: the kernels of {file} do not compile: {log}")]
    Compile {
        /// Which one.
        device: String,
        /// The source.
        file: &'static str,
        /// What the compiler says.
        log: String,
    },
    /// A kernel was asked for that does not exist, or not in this shape.
    #[error("device {device}: kernel {kernel} cannot run: {reason}")]
    Kernel {
        /// Which one.
        device: String,
        /// Its name.
        kernel: String,
        /// Why.
        reason: String,
    },
    /// Devices that work together do not any more.
    #[error("device {device} waited {seconds} s for the other devices in `{operation}`: {reason}")]
    Group {
        /// Which one.
        device: String,
        /// What they did.
        operation: &'static str,
        /// How long it waited.
        seconds: f64,
        /// What is known.
        reason: String,
    },
}

/// A number of bytes, as people read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 0..1024 => write!(f, "{bytes} B"),
            bytes @ 1024..1_048_576 => write!(f, "{:.1} KiB", bytes as f64 / 1024.0),
            bytes @ 1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", bytes as f64 / 1_048_576.0),
            bytes => write!(f, "{:.2} GiB", bytes as f64 / 1_073_741_824.0),
        }
    }
}

/// Who holds how much, the largest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held(pub Vec<(&'static str, u64)>);

impl Held {
    /// Of what each label holds, bytes.
    pub(crate) fn of(held: &BTreeMap<&'static str, u64>) -> Self {
        let mut all: Vec<_> =
            held.iter().filter(|(_, bytes)| **bytes > 0).map(|(label, bytes)| (*label, *bytes)).collect();
        all.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        Self(all)
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("other processes");
        }
        for (i, (label, bytes)) in self.0.iter().enumerate() {
            write!(f, "{}{label} ({})", if i == 0 { "" } else { ", " }, Bytes(*bytes))?;
        }
        Ok(())
    }
}
