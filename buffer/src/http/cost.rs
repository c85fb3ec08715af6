//! The decoded size of a body, computed before it is decoded.
//!
//! Invariant: the result is at least what decoding and validation allocate, and computing it allocates nothing that
//! grows with the body. Columns and details, which clients may shape freely, are counted as JSON values; everything
//! else by the types of `wire`.

use std::cell::Cell;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Fields that are lists of structs.
const LISTS: [&str; 7] = ["groups", "trajectories", "branches", "turns", "rewards", "versions", "prefill"];
/// Fields that are structs.
const RECORDS: [&str; 3] = ["task", "kept", "experts"];
/// Fields that clients may shape freely; a prompt can be a list of messages.
const FREE: [&str; 3] = ["columns", "details", "prompt"];
/// A growing vector has up to twice the capacity of its content, and is copied from one of half its size.
const GROWTH: usize = 3;
/// A number or flag of a typed stream: at most eight bytes; most are four, doubled by growth.
const NUMBER: usize = 8;
/// Overhead of an allocation: its header, and the pointer, length and capacity that refer to it.
const AROUND: usize = 48;
/// The largest struct of `wire`, the struct of `trajectory` made from it, and growth.
const STRUCT: usize = 640;
/// A JSON value in a vector.
const ANY: usize = GROWTH * size_of::<Value>();
/// The first allocation of a vector of JSON values.
const FIRST: usize = 4 * size_of::<Value>();
/// A non-empty map: its table and its first entries.
const MAP: usize = 1024;
/// An entry of a map: a hash, a name and a value.
const ENTRY: usize = GROWTH * (size_of::<Value>() + 32) + AROUND;

/// Accumulates the decoded size of values.
#[derive(Debug)]
pub(super) struct DecodeCost {
    used: Cell<usize>,
    limit: usize,
}

impl DecodeCost {
    /// No bytes yet; fails above `limit` bytes.
    pub(super) fn at_most(limit: usize) -> Self {
        Self { used: Cell::new(0), limit }
    }

    /// Bytes so far; above the limit if it was passed.
    pub(super) fn bytes(&self) -> usize {
        self.used.get()
    }

    /// Whether the limit was exceeded.
    pub(super) fn is_over(&self) -> bool {
        self.used.get() > self.limit
    }

    /// Adds one value.
    pub(super) fn count<'de, D: Deserializer<'de>>(&self, deserializer: D) -> Result<(), D::Error> {
        CostVisitor { cost: self, place: DecodedShape::Record }.deserialize(deserializer)
    }

    fn add<E: de::Error>(&self, bytes: usize) -> Result<(), E> {
        self.used.set(self.used.get().saturating_add(bytes));
        if self.is_over() {
            return Err(E::custom(format!("decoded it takes more than {} bytes", self.limit)));
        }
        Ok(())
    }
}

/// The type that a value is decoded as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DecodedShape {
    /// A struct of `wire`.
    Record,
    /// A list of them.
    List,
    /// Numbers or a text.
    Stream,
    /// A JSON value of any shape. So is a struct written as a list of its fields, since nothing then says which of
    /// them are columns.
    Free,
}

/// Visits one value.
#[derive(Clone, Copy)]
struct CostVisitor<'a> {
    cost: &'a DecodeCost,
    place: DecodedShape,
}

impl CostVisitor<'_> {
    fn is_free(self) -> bool {
        self.place == DecodedShape::Free
    }

    fn scalar<E: de::Error>(self) -> Result<(), E> {
        self.cost.add(if self.is_free() { ANY } else { NUMBER })
    }

    fn text<E: de::Error>(self, length: usize) -> Result<(), E> {
        let value = if self.is_free() { ANY } else { 0 };
        self.cost.add(value + AROUND + length)
    }
}

impl<'de> DeserializeSeed<'de> for CostVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for CostVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.scalar()
    }

    fn visit_none<E: de::Error>(self) -> Result<(), E> {
        self.scalar()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        self.text(text.len())
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<(), E> {
        // Each byte may become a value of a list.
        self.cost.add(AROUND.saturating_add(bytes.len().saturating_mul(ANY)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        let (around, place) = match self.place {
            DecodedShape::List => (AROUND, DecodedShape::Record),
            DecodedShape::Stream => (AROUND, DecodedShape::Stream),
            DecodedShape::Record | DecodedShape::Free => (ANY, DecodedShape::Free),
        };
        self.cost.add(around)?;
        let mut first = true;
        while sequence.next_element_seed(CostVisitor { place, ..self })?.is_some() {
            if std::mem::take(&mut first) && place == DecodedShape::Free {
                self.cost.add(FIRST)?;
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let is_record = self.place == DecodedShape::Record;
        self.cost.add(if is_record { STRUCT } else { ANY })?;
        let mut first = true;
        while let Some(place) = map.next_key_seed(FieldNameVisitor { cost: self.cost, is_record })? {
            if std::mem::take(&mut first) && !is_record {
                self.cost.add(MAP)?;
            }
            map.next_value_seed(CostVisitor { place, ..self })?;
        }
        Ok(())
    }
}

/// Visits a field name and returns the type of its value.
struct FieldNameVisitor<'a> {
    cost: &'a DecodeCost,
    /// Whether it is a field of a struct.
    is_record: bool,
}

impl<'de> DeserializeSeed<'de> for FieldNameVisitor<'_> {
    type Value = DecodedShape;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<DecodedShape, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for FieldNameVisitor<'_> {
    type Value = DecodedShape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<DecodedShape, E> {
        if !self.is_record {
            self.cost.add(ENTRY.saturating_add(name.len()))?;
            return Ok(DecodedShape::Free);
        }
        let is = |names: &[&str]| names.contains(&name);
        Ok(match name {
            _ if is(&LISTS) => DecodedShape::List,
            _ if is(&RECORDS) => DecodedShape::Record,
            _ if is(&FREE) => DecodedShape::Free,
            _ => DecodedShape::Stream,
        })
    }

    /// MessagePack can have the index of a field instead of its name.
    fn visit_u64<E: de::Error>(self, _: u64) -> Result<DecodedShape, E> {
        self.cost.add(ENTRY)?;
        Ok(DecodedShape::Free)
    }

    fn visit_bytes<E: de::Error>(self, name: &[u8]) -> Result<DecodedShape, E> {
        self.cost.add(ENTRY.saturating_add(name.len()))?;
        Ok(DecodedShape::Free)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cost(value: &Value) -> usize {
        let cost = DecodeCost::at_most(usize::MAX);
        cost.count(value).unwrap();
        cost.bytes()
    }

    /// Minimum bytes that a value allocates, by its types: its content, without growth.
    fn allocated(value: &Value) -> usize {
        size_of::<Value>()
            + match value {
                Value::Null | Value::Bool(_) | Value::Number(_) => 0,
                Value::String(text) => text.len(),
                Value::Array(items) => items.iter().map(allocated).sum(),
                Value::Object(map) => {
                    map.iter().map(|(name, value)| name.len() + 32 + allocated(value)).sum()
                }
            }
    }

    #[test]
    fn free_values_count_at_least_what_they_hold() {
        for value in [
            json!(vec![0; 1000]),
            json!(vec![json!({ "": 0 }); 100]),
            json!(vec![json!([[[]]]); 100]),
            json!({ "text": "x".repeat(5000), "more": { "a": null, "b": [true, 1.5, "c"] } }),
        ] {
            let counted = cost(&json!({ "columns": { "a": value } }));
            // Without field names nothing says which fields are columns.
            for unnamed in [json!([value]), json!({ "groups": [[{ "task": value }]] })] {
                assert!(cost(&unnamed) >= counted / 2, "{}", cost(&unnamed));
            }
            assert!(counted > allocated(&value), "{counted} of {}", allocated(&value));
            // Growth and headers, but not a large multiple.
            assert!(counted < 30 * allocated(&value) + 4096, "{counted} of {}", allocated(&value));
        }
    }

    #[test]
    fn streams_count_as_numbers_and_columns_as_values() {
        let (stream, columns) = (json!({ "token_ids": vec![1; 1000] }), json!({ "columns": vec![1; 1000] }));
        assert!(cost(&stream) < 1000 * NUMBER + 1000, "{}", cost(&stream));
        assert!(cost(&columns) > 1000 * size_of::<Value>());
    }

    #[test]
    fn counting_ends_at_the_limit() {
        let cost = DecodeCost::at_most(10_000);
        let error = cost.count(&json!({ "columns": vec![0; 1_000_000] })).unwrap_err().to_string();
        assert!(error.contains("more than 10000 bytes"), "{error}");
        assert!(cost.is_over() && cost.bytes() < 11_000, "{} bytes", cost.bytes());
    }
}
