//! The measurements of one training step.
//!
//! Invariant: names are unique and keep the order in which they were first set. `catalog` has the unit and the meaning of every
//! name; this module aggregates no values.

mod catalog;

pub(crate) use catalog::{METRICS, meaning};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// Named measurements in order, which side is the bottleneck, and what else there is to say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    values: Vec<(String, f64)>,
    /// Which side holds the run up, such as `trainer waits for rollout`; empty if nothing does.
    pub bottleneck: String,
    /// What else the step has to say, one sentence each, such as a reward that failed; shown below its row.
    pub notes: Vec<String>,
}

/// Whether `rlrun explain` knows the unit and the meaning of a metric.
#[must_use]
pub fn is_explained(name: &str) -> bool {
    meaning(name).is_some()
}

impl Metrics {
    /// Sets a measurement, in the unit that the table of metrics has for its name.
    pub fn set(&mut self, name: &str, value: f64) {
        match self.values.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => self.values.push((name.to_owned(), value)),
        }
    }

    /// The measurements of a line of `metrics.jsonl`.
    #[must_use]
    pub fn read(line: &serde_json::Map<String, serde_json::Value>) -> Self {
        let values = line.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)));
        Self { values: values.collect(), ..Self::default() }
    }

    /// A measurement, if it was taken.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    /// The bottleneck, if there is one, and the notes.
    pub fn remarks(&self) -> impl Iterator<Item = &str> {
        let bottleneck = (!self.bottleneck.is_empty()).then_some(self.bottleneck.as_str());
        bottleneck.into_iter().chain(self.notes.iter().map(String::as_str))
    }

    /// All measurements in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().map(|(name, value)| (name.as_str(), *value))
    }
}

impl Serialize for Metrics {
    /// One flat object. Whole numbers have no fraction, numbers that are not finite are null, as JSON has none.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in self.iter() {
            // Below 2^53 every whole f64 is exactly an i64.
            if value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0 {
                map.serialize_entry(name, &(value as i64))?;
            } else {
                map.serialize_entry(name, &value)?;
            }
        }
        let remarks: Vec<&str> = self.remarks().collect();
        if !remarks.is_empty() {
            map.serialize_entry("bottleneck", &remarks.join("; "))?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_one_flat_object_in_order() {
        let mut metrics = Metrics { bottleneck: "rollout".to_owned(), ..Metrics::default() };
        for (name, value) in [("step", 3.0), ("reward/mean", 0.5), ("kl/mismatch", f64::NAN), ("step", 4.0)] {
            metrics.set(name, value);
        }
        metrics.notes.push("reward `a`: 2 errors".to_owned());
        let expected =
            r#"{"step":4,"reward/mean":0.5,"kl/mismatch":null,"bottleneck":"rollout; reward `a`: 2 errors"}"#;
        assert_eq!(serde_json::to_string(&metrics).unwrap(), expected);
    }
}
