//! What a body takes once it is decoded, counted before anything of it is built.
//!
//! Invariant: the count is no less than what decoding and checking allocate for the body, and counting itself allocates
//! nothing that grows with it. Columns and details, whose shape is the client's own, are counted as the values that they
//! become; all else by the types of `wire`.

use std::cell::Cell;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Fields that are lists of structs.
const LISTS: [&str; 5] = ["groups", "trajectories", "turns", "rewards", "versions"];
/// Fields that are structs.
const RECORDS: [&str; 2] = ["task", "kept"];
/// Fields whose shape is the client's own; a prompt can be one of messages.
const FREE: [&str; 3] = ["columns", "details", "prompt"];
/// A vector that grows is up to twice as large as what is in it, and is copied from one of half its size.
const GROWTH: usize = 3;
/// A number or a flag of a typed stream, which is at most eight bytes wide; most are four and doubled by growth.
const NUMBER: usize = 8;
/// Around every allocation: its header in memory and the pointer, length and capacity that lead to it.
const AROUND: usize = 48;
/// The largest struct of `wire`, its successor in `trajectory`, and growth.
const STRUCT: usize = 640;
/// A value of any shape in a vector of such.
const ANY: usize = GROWTH * size_of::<Value>();
/// The first allocation of a vector of values.
const FIRST: usize = 4 * size_of::<Value>();
/// A map that is not empty: its table and its first entries.
const MAP: usize = 1024;
/// An entry of a map: a hash, a name and a value.
const ENTRY: usize = GROWTH * (size_of::<Value>() + 32) + AROUND;

/// Counts what is decoded from now on.
#[derive(Debug)]
pub(super) struct DecodeCost {
    used: Cell<usize>,
    limit: usize,
}

impl DecodeCost {
    /// Nothing yet; at most `limit` bytes.
    pub(super) fn at_most(limit: usize) -> Self {
        Self { used: Cell::new(0), limit }
    }

    /// Bytes so far; above the limit if it was passed.
    pub(super) fn bytes(&self) -> usize {
        self.used.get()
    }

    /// Whether counting ended at the limit.
    pub(super) fn is_over(&self) -> bool {
        self.used.get() > self.limit
    }

    /// Reads one value and counts it.
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

/// What a value is decoded as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DecodedShape {
    /// A struct of `wire`.
    Record,
    /// A list of them.
    List,
    /// Plain numbers or a text.
    Stream,
    /// Anything, kept as it is. So is what does not have the shape of its place: a struct can be written as a list of its
    /// fields too, and then nothing says which of them are columns.
    Free,
}

/// One value.
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
        // Each may become a value of a list.
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

/// The name of a field; what stands under it.
struct FieldNameVisitor<'a> {
    cost: &'a DecodeCost,
    /// It is one of a struct.
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

    /// MessagePack can give the number of a field for its name.
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

    /// Bytes that a value has allocated at least, by its types: what is in it, without growth.
    fn held(value: &Value) -> usize {
        size_of::<Value>()
            + match value {
                Value::Null | Value::Bool(_) | Value::Number(_) => 0,
                Value::String(text) => text.len(),
                Value::Array(items) => items.iter().map(held).sum(),
                Value::Object(map) => map.iter().map(|(name, value)| name.len() + 32 + held(value)).sum(),
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
            // Without names nothing says which of the fields are columns.
            for unnamed in [json!([value]), json!({ "groups": [[{ "task": value }]] })] {
                assert!(cost(&unnamed) >= counted / 2, "{}", cost(&unnamed));
            }
            assert!(counted > held(&value), "{counted} of {}", held(&value));
            // Growth and headers, not a multiple of what is sensible.
            assert!(counted < 30 * held(&value) + 4096, "{counted} of {}", held(&value));
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
