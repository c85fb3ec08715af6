//! JSON with numbers that are not finite, as texts: `"NaN"`, `"Infinity"`, `"-Infinity"`.
//!
//! Invariant: a finite number is written with the digits that are read back as the same number. The SDKs read the texts as the
//! numbers that they name; a `null`, or a bare `NaN`, is an error of their decoder, and hides that a loss has diverged.

use std::collections::BTreeMap;
use std::fmt::{Debug, Write as _};

/// A text of JSON that is being written.
#[derive(Debug, Default)]
pub(super) struct JsonText(String);

impl JsonText {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0.into_bytes()
    }

    pub(super) fn raw(&mut self, text: &str) -> &mut Self {
        self.0.push_str(text);
        self
    }

    pub(super) fn string(&mut self, text: &str) -> &mut Self {
        let quoted = serde_json::Value::from(text);
        self.display(quoted)
    }

    pub(super) fn display(&mut self, value: impl std::fmt::Display) -> &mut Self {
        // A string has no error when it is written to.
        let _ = write!(self.0, "{value}");
        self
    }

    pub(super) fn number<T: Copy + Debug + Into<f64>>(&mut self, value: T) -> &mut Self {
        let wide: f64 = value.into();
        if wide.is_nan() {
            return self.string("NaN");
        }
        if wide.is_infinite() {
            return self.string(if wide > 0.0 { "Infinity" } else { "-Infinity" });
        }
        // The shortest digits, with an exponent where it is shorter: both are numbers of JSON.
        let _ = write!(self.0, "{value:?}");
        self
    }

    /// A list whose items `write` writes.
    pub(super) fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        self.raw("[");
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.raw(",");
            }
            write(self, item);
        }
        self.raw("]")
    }

    /// An object whose values `write` writes.
    pub(super) fn object<'a, T: 'a>(
        &mut self,
        fields: impl IntoIterator<Item = (&'a String, T)>,
        mut write: impl FnMut(&mut Self, T),
    ) -> &mut Self {
        self.raw("{");
        for (index, (name, value)) in fields.into_iter().enumerate() {
            if index > 0 {
                self.raw(",");
            }
            self.string(name).raw(":");
            write(self, value);
        }
        self.raw("}")
    }

    pub(super) fn metrics(&mut self, metrics: &BTreeMap<String, f64>) -> &mut Self {
        self.object(metrics, |text, value| {
            text.number(*value);
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_texts() {
        let mut text = JsonText::default();
        text.list([f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e-12, 3.0], |text, value| {
            text.number(value);
        });
        assert_eq!(text.into_bytes(), br#"["NaN","Infinity","-Infinity",1e-12,3.0]"#);
    }

    proptest! {
        #[test]
        fn finite_numbers_are_read_back(bits: u32) {
            let value = f32::from_bits(bits);
            prop_assume!(value.is_finite());
            let mut text = JsonText::default();
            text.number(value);
            let read: f64 = serde_json::from_slice(&text.into_bytes()).unwrap();
            prop_assert_eq!((read as f32).to_bits(), value.to_bits());
        }
    }
}
