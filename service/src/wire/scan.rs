//! What a protobuf body would take in memory, before it is decoded, and whose request it is if it cannot be.
//!
//! Invariant: it reads each byte a bounded number of times and allocates nothing in proportion to the body but the name of a model.
//! [`check_pass`] accepts no field number that the messages of [`super::protobuf`] do not have.

use super::{MAX_MESSAGE_BYTES, WireError, refuse};

/// Upper bound of what one message or map entry takes when it is decoded, beside its `bytes`, bytes.
const MESSAGE_BYTES: usize = 256;
/// What one number of a repeated field takes, bytes.
const NUMBER_BYTES: usize = 8;

/// Longest name of a model that is read from a body that is refused, bytes.
const MAX_NAME: usize = 256;

/// What a field of a message contains.
#[derive(Clone, Copy)]
enum FieldContent {
    /// A number, text or bytes.
    Plain,
    /// A repeated number, packed or not.
    Numbers,
    /// A message.
    Message(&'static MessageShape),
}

/// Name and fields of a message, by number.
struct MessageShape {
    name: &'static str,
    fields: &'static [(u64, FieldContent)],
}

use FieldContent::{Message, Numbers, Plain};

static PASS: MessageShape = MessageShape {
    name: "ForwardBackwardRequest",
    fields: &[
        (1, Plain),
        (2, Plain),
        (3, Message(&DATUM)),
        (4, Plain),
        (5, Message(&NUMBER_ENTRY)),
        (6, Plain),
        (7, Message(&SETTING_ENTRY)),
    ],
};
static NUMBER_ENTRY: MessageShape =
    MessageShape { name: "LossFnConfigEntry", fields: &[(1, Plain), (2, Plain)] };
static SETTING_ENTRY: MessageShape =
    MessageShape { name: "LossFnConfigV2Entry", fields: &[(1, Plain), (2, Message(&SETTING))] };
static SETTING: MessageShape = MessageShape { name: "LossConfigValue", fields: &[(1, Plain), (2, Plain)] };
static DATUM: MessageShape = MessageShape {
    name: "Datum",
    fields: &[(1, Message(&CHUNK)), (2, Message(&INPUT_ENTRY)), (3, Message(&SPAN)), (4, Message(&SPAN))],
};
static CHUNK: MessageShape = MessageShape {
    name: "Chunk",
    fields: &[(1, Message(&TEXT)), (2, Message(&IMAGE)), (3, Message(&SOUND))],
};
static TEXT: MessageShape = MessageShape { name: "EncodedTextChunk", fields: &[(1, Plain)] };
static IMAGE: MessageShape =
    MessageShape { name: "ImageChunk", fields: &[(1, Plain), (2, Plain), (3, Plain), (4, Plain)] };
static SOUND: MessageShape = MessageShape { name: "DmelChunk", fields: &[(1, Plain)] };
static INPUT_ENTRY: MessageShape =
    MessageShape { name: "LossFnInputsEntry", fields: &[(1, Plain), (2, Message(&TENSOR))] };
static TENSOR: MessageShape =
    MessageShape { name: "Tensor", fields: &[(1, Plain), (2, Message(&CSR)), (3, Plain), (4, Numbers)] };
static CSR: MessageShape = MessageShape { name: "SparseCsr", fields: &[(1, Plain), (2, Plain), (3, Plain)] };
static SPAN: MessageShape =
    MessageShape { name: "ProvenanceSpan", fields: &[(1, Message(&RANGE)), (2, Message(&RANGE))] };
static RANGE: MessageShape =
    MessageShape { name: "ProvenanceSpan", fields: &[(1, Plain), (2, Plain), (3, Plain)] };

/// Checks that a `ForwardBackwardRequest` takes at most [`MAX_MESSAGE_BYTES`] beside its bytes, and has no unknown field.
pub(super) fn check_pass(body: &[u8]) -> Result<(), WireError> {
    check(body, &PASS, &mut 0)
}

/// Depth is that of the shapes, which contain no circle.
fn check(mut body: &[u8], shape: &MessageShape, cost_bytes: &mut usize) -> Result<(), WireError> {
    while !body.is_empty() {
        let Some((number, value)) = next_field(&mut body) else {
            return refuse(format!("the body is no protobuf message `{}`", shape.name));
        };
        let Some((_, content)) = shape.fields.iter().find(|(known, _)| *known == number) else {
            return refuse(format!(
                "field {number} of the protobuf message `{}` is not known here; use tinker 0.38.0 or earlier",
                shape.name
            ));
        };
        *cost_bytes += match (content, value) {
            (Plain, _) => 0,
            (Numbers, FieldBits::Bytes(bytes)) => NUMBER_BYTES * bytes.len(),
            (Numbers, _) => NUMBER_BYTES,
            (Message(_), _) => MESSAGE_BYTES,
        };
        if *cost_bytes > MAX_MESSAGE_BYTES {
            return refuse("the body has too many messages; send fewer sequences at once");
        }
        if let (Message(inner), FieldBits::Bytes(bytes)) = (content, value) {
            check(bytes, inner, cost_bytes)?;
        }
    }
    Ok(())
}

/// Model and number of a `ForwardBackwardRequest` whose other fields may be wrong. `None` if the bytes are no fields, or if it
/// has neither.
pub(super) fn request_of_pass(mut body: &[u8]) -> Option<(String, u64)> {
    let (mut model_id, mut seq_id) = (None, None);
    while !body.is_empty() {
        match next_field(&mut body)? {
            (1, FieldBits::Bytes(name)) if name.len() <= MAX_NAME => {
                model_id = Some(std::str::from_utf8(name).ok()?.to_owned());
            }
            (2, FieldBits::Number(number)) => seq_id = Some(number),
            _ => {}
        }
    }
    // A negative number has the upper bits set.
    let seq_id = seq_id.filter(|number| (1..=u64::from(i32::MAX.cast_unsigned())).contains(number))?;
    Some((model_id?, seq_id))
}

/// The value of a field.
#[derive(Clone, Copy)]
enum FieldBits<'a> {
    Number(u64),
    /// Four or eight bytes.
    Fixed,
    /// Delimited by a length.
    Bytes(&'a [u8]),
}

/// The number of the next field, and its value. `None` for what is no field.
fn next_field<'a>(body: &mut &'a [u8]) -> Option<(u64, FieldBits<'a>)> {
    let key = varint(body)?;
    let value = match key & 7 {
        0 => FieldBits::Number(varint(body)?),
        1 => body.split_off(..8).map(|_| FieldBits::Fixed)?,
        2 => {
            let length = usize::try_from(varint(body)?).ok()?;
            FieldBits::Bytes(body.split_off(..length)?)
        }
        5 => body.split_off(..4).map(|_| FieldBits::Fixed)?,
        // Groups are not used.
        _ => return None,
    };
    Some((key >> 3, value))
}

fn varint(body: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = *body.split_off_first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
