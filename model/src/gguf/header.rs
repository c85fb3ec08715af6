//! The header of a GGUF file: metadata, and where each tensor lies.
//!
//! ```text
//! magic "GGUF" | version u32 | tensors u64 | keys u64
//! key     : text, type u32, value            text : length u64, UTF-8
//! tensor  : text, dimensions u32, u64 each, innermost first, type u32, offset u64
//! padding to general.alignment | data of all tensors
//! ```
//!
//! Invariant: candle-core's reader sees only a header that [`check`] has walked through. Left alone, that reader divides by an
//! alignment of 0, and allocates 32 bytes for each byte of an array. Every tensor of a header that is read lies in the file, and
//! all of them have no more bytes than the file, so that its length bounds the memory of the weights.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, DEFAULT_ALIGNMENT, Value as GgufValue};
use serde_json::{Map, Number, Value};

/// Longest header, bytes. A vocabulary of 49 000 tokens has a header of 1.8 million, the largest that are published have about
/// 16 million.
const MAX_HEADER_BYTES: usize = 64 << 20;
/// Most elements of all arrays: text, kind and score of every token, and the merges. The largest vocabularies that are published
/// have about 1.3 million.
const MAX_ELEMENTS: u64 = 1 << 22;
const MAX_KEYS: u64 = 1 << 14;
const MAX_TENSORS: u64 = 1 << 17;
const MAX_DIMENSIONS: u32 = 4;

const MAGIC: &[u8] = b"GGUF";
const VERSIONS: [u32; 2] = [2, 3];
const ALIGNMENT: &str = "general.alignment";
/// Type of an array value.
const ARRAY: u32 = 9;
/// Type of a text value.
const TEXT: u32 = 8;
const U32: u32 = 4;

/// Ids of the number formats that are read.
const FORMATS: [u32; 14] = [0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 15, 30];
/// Their names, for messages.
const FORMAT_NAMES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K";

/// A header.
pub(super) struct Header {
    pub(super) metadata: Map<String, Value>,
    pub(super) tensors: BTreeMap<String, GgufTensor>,
}

/// A tensor of the file.
#[derive(Clone, Debug)]
pub(super) struct GgufTensor {
    pub(super) dtype: GgmlDType,
    /// Outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// Its bytes in the file.
    pub(super) bytes: Range<usize>,
}

/// What a walk through a header has found.
struct Walked {
    keys: usize,
    tensors: usize,
    /// Bytes of the header.
    len: usize,
}

/// Reads the header at the start of `file`, all bytes of a file.
///
/// # Errors
/// What is wrong with it, and the remedy.
pub(super) fn read(file: &[u8]) -> Result<Header, String> {
    let walked = check(file)?;
    let content = Content::read(&mut Cursor::new(&file[..walked.len]));
    let content = content.map_err(|error| damaged(&error.to_string()))?;
    if (content.metadata.len(), content.tensor_infos.len()) != (walked.keys, walked.tensors) {
        return Err(damaged("it names a key or a tensor twice"));
    }
    let mut tensors = BTreeMap::new();
    let mut all_bytes = 0usize;
    for (name, tensor) in content.tensor_infos {
        let start = content.tensor_data_offset.checked_add(tensor.offset);
        let shape = tensor.shape.into_dims();
        let bytes = start.and_then(|start| extent(start, &shape, tensor.ggml_dtype));
        let Some(bytes) = bytes else {
            return Err(damaged(&format!(
                "tensor {name} has the shape {shape:?} at offset {}",
                tensor.offset
            )));
        };
        if bytes.end > file.len() {
            return Err(format!(
                "tensor {name} ends at byte {}, and the file has {} bytes; it was probably cut off: fetch it again",
                bytes.end,
                file.len()
            ));
        }
        all_bytes = all_bytes.saturating_add(bytes.len());
        if all_bytes > file.len() {
            return Err(damaged(&format!(
                "tensor {name} overlaps others: all tensors have more bytes than the {} of the file",
                file.len()
            )));
        }
        tensors.insert(name, GgufTensor { dtype: tensor.ggml_dtype, shape, bytes });
    }
    let metadata = content.metadata.into_iter().map(|(key, value)| (key, json(value))).collect();
    Ok(Header { metadata, tensors })
}

/// The bytes of a tensor; `None` if its rows are not whole blocks, or it is beyond any file.
fn extent(start: u64, shape: &[usize], dtype: GgmlDType) -> Option<Range<usize>> {
    let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size))?;
    let row = shape.last().copied().unwrap_or(0);
    if elements == 0 || !row.is_multiple_of(dtype.block_size()) {
        return None;
    }
    let len = (elements / dtype.block_size()).checked_mul(dtype.type_size())?;
    let start = usize::try_from(start).ok()?;
    Some(start..start.checked_add(len)?)
}

/// The value as JSON. A number that JSON does not have becomes a text, which no numeric key takes.
fn json(value: GgufValue) -> Value {
    let float = |x: f64| Number::from_f64(x).map_or_else(|| Value::from(x.to_string()), Value::Number);
    match value {
        GgufValue::U8(x) => x.into(),
        GgufValue::I8(x) => x.into(),
        GgufValue::U16(x) => x.into(),
        GgufValue::I16(x) => x.into(),
        GgufValue::U32(x) => x.into(),
        GgufValue::I32(x) => x.into(),
        GgufValue::U64(x) => x.into(),
        GgufValue::I64(x) => x.into(),
        // The shortest decimal: 1e-5, not 9.999999747378752e-6.
        GgufValue::F32(x) => float(x.to_string().parse().unwrap_or(f64::NAN)),
        GgufValue::F64(x) => float(x),
        GgufValue::Bool(x) => x.into(),
        GgufValue::String(x) => x.into(),
        GgufValue::Array(list) => list.into_iter().map(json).collect(),
    }
}

fn damaged(what: &str) -> String {
    format!("{what}; the file is damaged: fetch it again")
}

/// Walks through a header without building it.
fn check(file: &[u8]) -> Result<Walked, String> {
    let mut walk = Walk { header: &file[..file.len().min(MAX_HEADER_BYTES)], at: 0, elements: 0 };
    if walk.take(4)? != MAGIC {
        return Err("it does not begin with `GGUF`; name a GGUF file, or a model directory".to_owned());
    }
    let version = walk.u32()?;
    if !VERSIONS.contains(&version) {
        return Err(format!(
            "it has version {version} of the format, and versions {VERSIONS:?} with little-endian numbers are read; convert \
             the model again with llama.cpp's convert_hf_to_gguf"
        ));
    }
    let (tensors, keys) = (walk.u64()?, walk.u64()?);
    if tensors > MAX_TENSORS || keys > MAX_KEYS {
        return Err(damaged(&format!(
            "its header declares {tensors} tensors and {keys} keys, of at most {MAX_TENSORS} and {MAX_KEYS}"
        )));
    }
    let mut alignment = DEFAULT_ALIGNMENT;
    for _ in 0..keys {
        let key = walk.text()?;
        let kind = walk.u32()?;
        if key == ALIGNMENT {
            if kind != U32 {
                return Err(damaged(&format!("`{ALIGNMENT}` is no u32")));
            }
            alignment = u64::from(walk.u32()?);
        } else {
            walk.value(key, kind)?;
        }
    }
    // Blocks are read in place, which needs the alignment of their numbers.
    if !alignment.is_power_of_two() || alignment < 8 {
        return Err(damaged(&format!("`{ALIGNMENT}` is {alignment}, expected a power of two of at least 8")));
    }
    for _ in 0..tensors {
        walk.tensor(alignment)?;
    }
    Ok(Walked { keys: keys as usize, tensors: tensors as usize, len: walk.at })
}

struct Walk<'a> {
    /// The file, up to the longest header.
    header: &'a [u8],
    at: usize,
    /// Elements of all arrays so far.
    elements: u64,
}

impl<'a> Walk<'a> {
    fn take(&mut self, len: u64) -> Result<&'a [u8], String> {
        let rest = &self.header[self.at..];
        let Some(taken) = usize::try_from(len).ok().and_then(|len| rest.get(..len)) else {
            return Err(match self.header.len() {
                MAX_HEADER_BYTES => damaged(&format!("its header has more than {MAX_HEADER_BYTES} bytes")),
                len => format!(
                    "its header goes on after the {len} bytes of the file; it was probably cut off: fetch it again"
                ),
            });
        };
        self.at += taken.len();
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(self.take(4)?.first_chunk().copied().map_or(0, u32::from_le_bytes))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(self.take(8)?.first_chunk().copied().map_or(0, u64::from_le_bytes))
    }

    fn text(&mut self) -> Result<&'a str, String> {
        let len = self.u64()?;
        let at = self.at;
        std::str::from_utf8(self.take(len)?)
            .map_err(|_| damaged(&format!("the text of {len} bytes at byte {at} is not UTF-8")))
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<(), String> {
        if kind != ARRAY {
            return self.scalar(key, kind);
        }
        let (kind, len) = (self.u32()?, self.u64()?);
        self.elements = self.elements.saturating_add(len);
        if self.elements > MAX_ELEMENTS {
            return Err(damaged(&format!(
                "`{key}` has {len} elements, and all arrays have at most {MAX_ELEMENTS}"
            )));
        }
        (0..len).try_for_each(|_| self.scalar(key, kind))
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<(), String> {
        let bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            TEXT => return self.text().map(drop),
            _ => return Err(damaged(&format!("`{key}` is of the unknown type {kind}"))),
        };
        self.take(bytes).map(drop)
    }

    fn tensor(&mut self, alignment: u64) -> Result<(), String> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(damaged(&format!("tensor {name} has {dimensions} dimensions")));
        }
        self.take(8 * u64::from(dimensions))?;
        let format = self.u32()?;
        if !FORMATS.contains(&format) {
            return Err(format!(
                "tensor {name} is quantised in the format with id {format} of ggml, which is not read; read are \
                 {FORMAT_NAMES}: fetch the model in one of these, or quantise it again"
            ));
        }
        let offset = self.u64()?;
        if !offset.is_multiple_of(alignment) {
            return Err(damaged(&format!("tensor {name} begins at {offset}, which `{ALIGNMENT}` forbids")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with two tensors of 4096 f32 at these offsets.
    fn two_tensors(offsets: [u64; 2]) -> Vec<u8> {
        let mut file = [MAGIC, &3u32.to_le_bytes(), &2u64.to_le_bytes(), &0u64.to_le_bytes()].concat();
        for (name, offset) in ["a", "b"].into_iter().zip(offsets) {
            file.extend([&1u64.to_le_bytes()[..], name.as_bytes()].concat());
            file.extend([&1u32.to_le_bytes()[..], &4096u64.to_le_bytes(), &0u32.to_le_bytes()].concat());
            file.extend(offset.to_le_bytes());
        }
        let data = file.len().next_multiple_of(32) + *offsets.iter().max().unwrap() as usize;
        file.resize(data + 4096 * 4, 0);
        file
    }

    #[test]
    fn tensors_that_share_bytes_are_refused() {
        assert_eq!(read(&two_tensors([0, 4096 * 4])).unwrap().tensors.len(), 2);
        let error = read(&two_tensors([0, 0])).err().unwrap();
        assert!(error.contains("overlaps others") && error.contains("fetch it again"), "{error}");
    }
}
