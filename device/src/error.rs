//! Errors of devices.

use std::collections::BTreeMap;
use std::fmt;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// An error of a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device does not exist, or cannot be used.
    #[error("device {device} cannot be used: {reason}")]
    Unavailable {
        /// The device, as requested.
        device: String,
        /// Reason and remedy.
        reason: String,
    },
    /// Device memory is full.
    #[error(
        "device {device} has no memory for {wanted} more of {label}: {free} of {total} are free; the largest users are {usage}; {remedy}"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Size of the allocation.
        wanted: ByteCount,
        /// Label of the allocation.
        label: &'static str,
        /// Free memory.
        free: ByteCount,
        /// Total memory.
        total: ByteCount,
        /// Memory of this process by label, largest first.
        usage: MemoryUsage,
        /// Remedy.
        remedy: &'static str,
    },
    /// A call of the driver or a library failed.
    #[error("device {device}: {call} failed: {reason}")]
    Call {
        /// The device.
        device: String,
        /// Name of the call.
        call: &'static str,
        /// The library's message.
        reason: String,
    },
    /// A kernel does not compile.
    #[error("device {device}: the kernels of {file} do not compile: {log}")]
    Compile {
        /// The device.
        device: String,
        /// The source file.
        file: &'static str,
        /// The compiler's log.
        log: String,
    },
    /// A kernel does not exist, or cannot be launched with this shape.
    #[error("device {device}: kernel {kernel} cannot run: {reason}")]
    Kernel {
        /// The device.
        device: String,
        /// Name of the kernel.
        kernel: String,
        /// Reason.
        reason: String,
    },
    /// A collective operation of a device group failed.
    #[error("device {device} waited {seconds} s for the other devices in `{operation}`: {reason}")]
    Group {
        /// The device.
        device: String,
        /// The operation.
        operation: &'static str,
        /// Time waited, seconds.
        seconds: f64,
        /// Reason.
        reason: String,
    },
    /// Another rank that computes with this device is lost, late, or makes another call.
    #[error("the ranks cannot compute together: {reason}")]
    Peer {
        /// Which rank, with a remedy.
        reason: String,
    },
}

/// A number of bytes; displayed with a binary unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub u64);

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 0..1024 => write!(f, "{bytes} B"),
            bytes @ 1024..1_048_576 => write!(f, "{:.1} KiB", bytes as f64 / 1024.0),
            bytes @ 1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", bytes as f64 / 1_048_576.0),
            bytes => write!(f, "{:.2} GiB", bytes as f64 / 1_073_741_824.0),
        }
    }
}

/// Memory by label in bytes, largest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUsage(pub Vec<(&'static str, u64)>);

impl MemoryUsage {
    /// Sorts `usage`, bytes by label.
    pub(crate) fn of(usage: &BTreeMap<&'static str, u64>) -> Self {
        let mut all: Vec<_> =
            usage.iter().filter(|(_, bytes)| **bytes > 0).map(|(label, bytes)| (*label, *bytes)).collect();
        all.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        Self(all)
    }
}

impl fmt::Display for MemoryUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("other processes");
        }
        for (i, (label, bytes)) in self.0.iter().enumerate() {
            write!(f, "{}{label} ({})", if i == 0 { "" } else { ", " }, ByteCount(*bytes))?;
        }
        Ok(())
    }
}
