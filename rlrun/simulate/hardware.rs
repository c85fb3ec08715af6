//! Files that describe hardware.
//!
//! Invariant: every number has a source in the file; numbers are positive. Files of users are read up to a size.

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;

use crate::failure::Failure;
use crate::recipe::words::ModelDtype;

/// Largest file, bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The files of this program.
const KNOWN: [(&str, &str); 6] = [
    ("a100", include_str!("../hardware/a100.toml")),
    ("b200", include_str!("../hardware/b200.toml")),
    ("cpu", include_str!("../hardware/cpu.toml")),
    ("h100", include_str!("../hardware/h100.toml")),
    ("h200", include_str!("../hardware/h200.toml")),
    ("l40s", include_str!("../hardware/l40s.toml")),
];

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HardwareKind {
    /// The cores of a machine.
    Cpu,
    /// GPUs, each with memory of its own.
    Gpu,
}

/// A number and where it is from.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourcedNumber {
    /// The number.
    pub value: f64,
    /// Address, document or assumption.
    pub source: String,
}

/// One device, or the cores of a machine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Name.
    pub name: String,
    /// What computes.
    pub kind: HardwareKind,
    /// Operations per second: dense bf16 on a GPU, f32 on cores.
    pub flops_per_s: SourcedNumber,
    /// Operations per second of a GPU in f32.
    pub flops_f32_per_s: Option<SourcedNumber>,
    /// Bytes of memory.
    pub memory_bytes: SourcedNumber,
    /// Bytes per second from memory.
    pub bandwidth_bytes_per_s: SourcedNumber,
    /// Bytes per second to another device of the machine.
    pub link_bytes_per_s: SourcedNumber,
    /// Bytes per second to other machines.
    pub network_bytes_per_s: SourcedNumber,
    /// Bytes per second between a device and the memory of its host, in one direction.
    pub host_bytes_per_s: SourcedNumber,
    /// Devices of a machine; messages beyond them go over the network.
    pub devices_per_machine: SourcedNumber,
    /// Least time of a collective call within a machine, seconds.
    pub link_latency_s: SourcedNumber,
    /// Least time of a collective call between machines, seconds.
    pub network_latency_s: SourcedNumber,
    /// Share of the operations that training reaches.
    pub training_share: SourcedNumber,
    /// Share of the operations that prefill reaches.
    pub prefill_share: SourcedNumber,
    /// Share of the bandwidth that decoding reaches.
    pub decoding_share: SourcedNumber,
    /// Least time of a pass, seconds.
    pub launch_s: SourcedNumber,
}

impl Hardware {
    /// The hardware of this name, in any case of letters, or of this file.
    ///
    /// # Errors
    /// A name that is neither, a file that is too large, is no TOML of this form, or has a number that is not positive.
    pub fn open(name: &str) -> Result<Self, Failure> {
        let lower = name.to_lowercase();
        if let Some((_, text)) = KNOWN.iter().find(|(known, _)| *known == lower) {
            return Self::parse(text, name);
        }
        let path = Path::new(name);
        let names = KNOWN.map(|(known, _)| known).join(", ");
        let text = model::files::read_text(path, MAX_BYTES).map_err(|source| match source.kind() {
            ErrorKind::NotFound => Failure::NotThere(format!(
                "`{name}` is no known hardware and no file; known are {names}, others are TOML files like these"
            )),
            _ => Failure::Argument(format!("`{name}` cannot be a hardware file: {source}; name another one")),
        })?;
        Self::parse(&text, name)
    }

    fn parse(text: &str, name: &str) -> Result<Self, Failure> {
        let hardware: Self = toml::from_str(text).map_err(|error| {
            Failure::Argument(format!(
                "`{name}` is no hardware file: {error}; `rlrun/hardware/h200.toml` is an example"
            ))
        })?;
        for (key, number) in hardware.numbers() {
            if !(number.value.is_finite() && number.value > 0.0) || number.source.trim().is_empty() {
                let what = format!(
                    "`{key}` of `{name}` is {}, from `{}`; give a positive number and its source",
                    number.value, number.source
                );
                return Err(Failure::Argument(what));
            }
        }
        Ok(hardware)
    }

    /// Seconds in which a device sends `bytes` bytes in `calls` collective calls among ranks of which the first and the last are
    /// `span` devices apart, both included: within a machine, or over the network.
    #[must_use]
    pub fn exchange_s(&self, span: usize, bytes: f64, calls: f64) -> f64 {
        let (speed, latency_s) = if self.is_one_machine(span) {
            (&self.link_bytes_per_s, &self.link_latency_s)
        } else {
            (&self.network_bytes_per_s, &self.network_latency_s)
        };
        bytes / speed.value + calls * latency_s.value
    }

    /// Whether so many devices are in one machine.
    #[must_use]
    pub fn is_one_machine(&self, devices: usize) -> bool {
        devices as f64 <= self.devices_per_machine.value
    }

    /// Operations per second with numbers of this format; `None` if the file does not say it.
    #[must_use]
    pub fn flops(&self, dtype: ModelDtype) -> Option<f64> {
        match (self.kind, dtype) {
            (HardwareKind::Gpu, ModelDtype::F32) => self.flops_f32_per_s.as_ref().map(|number| number.value),
            _ => Some(self.flops_per_s.value),
        }
    }

    /// All numbers by their keys.
    pub fn numbers(&self) -> impl Iterator<Item = (&'static str, &SourcedNumber)> {
        [
            ("flops_per_s", &self.flops_per_s),
            ("memory_bytes", &self.memory_bytes),
            ("bandwidth_bytes_per_s", &self.bandwidth_bytes_per_s),
            ("link_bytes_per_s", &self.link_bytes_per_s),
            ("network_bytes_per_s", &self.network_bytes_per_s),
            ("host_bytes_per_s", &self.host_bytes_per_s),
            ("devices_per_machine", &self.devices_per_machine),
            ("link_latency_s", &self.link_latency_s),
            ("network_latency_s", &self.network_latency_s),
            ("training_share", &self.training_share),
            ("prefill_share", &self.prefill_share),
            ("decoding_share", &self.decoding_share),
            ("launch_s", &self.launch_s),
        ]
        .into_iter()
        .chain(self.flops_f32_per_s.iter().map(|number| ("flops_f32_per_s", number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_read_and_every_number_has_a_source() {
        for (name, _) in KNOWN {
            let hardware = Hardware::open(&name.to_uppercase()).unwrap();
            assert_eq!(hardware.name, name);
            assert!(hardware.numbers().all(|(_, number)| number.source.len() > 10), "{name}");
        }
        assert_eq!(Hardware::open("H200").unwrap().memory_bytes.value, 141e9);
        let cpu = Hardware::open("cpu").unwrap();
        assert_eq!(cpu.kind, HardwareKind::Cpu);
        assert_eq!(cpu.flops(ModelDtype::F32), Some(cpu.flops_per_s.value));
        // Tensor cores compute no products in f32.
        for (name, _) in KNOWN.iter().filter(|(name, _)| *name != "cpu") {
            let gpu = Hardware::open(name).unwrap();
            assert!(
                gpu.flops(ModelDtype::F32).unwrap() < 0.3 * gpu.flops(ModelDtype::Auto).unwrap(),
                "{name}"
            );
        }
    }

    #[test]
    fn wrong_files_are_refused_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.toml");
        let refused = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let failure = Hardware::open(file.to_str().unwrap()).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            failure.to_string()
        };
        assert!(refused("name = 1").contains("is no hardware file"));
        let good = KNOWN[4].1;
        assert!(refused(&good.replace("1.41e11", "-1")).contains("`memory_bytes`"));
        assert!(refused(&good.replace("1.41e11", "nan")).contains("positive"));
        assert!(refused(&format!("colour = \"red\"\n{good}")).contains("colour"));
        assert!(refused(&"#".repeat(70_000)).contains("70000 bytes, and at most 65536"));
        assert!(Hardware::open("h2000").unwrap_err().to_string().contains("known are a100, b200"));
    }
}
