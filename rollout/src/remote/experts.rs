//! The experts of tokens, as engines report them for routing replay (Ma et al. 2025, arXiv 2510.11370).
//!
//! vLLM answers with a file of NumPy in base64, `[tokens - 1, layers, per_token]` numbers in 8, 16 or 32 bits; SGLang with such numbers
//! alone, in 32 bits. Both have every layer of the model, and the experts of a token in any order.
//!
//! Invariant: as in `protocol`: a form that is not this one is an error that says what was found; sizes are compared before anything
//! is decoded.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::Config;
use trajectory::TokenExperts;

use super::client::EngineFailure;
use super::protocol::{EngineCompletion, EngineEnd, EngineKind};

/// Longest header of a file of NumPy with three dimensions, bytes.
const MAX_HEADER: usize = 1024;

/// The layers of a model that have experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RoutedLayers {
    /// Of every layer, whether it has experts.
    routed: Vec<bool>,
    /// Experts of a token in a layer.
    per_token: usize,
    /// Experts of a layer.
    count: usize,
}

impl RoutedLayers {
    /// Those of a model; `None` if no layer has experts.
    pub(super) fn of(config: &Config) -> Option<Self> {
        let spec = config.experts()?;
        let routed = config.layers.iter().map(|layer| layer.feed_forward.experts().is_some()).collect();
        Some(Self { routed, per_token: spec.per_token, count: spec.count })
    }

    /// The parts of completions with the experts of all their tokens; `before` gives the tokens before the part of a number.
    ///
    /// # Errors
    /// An answer without experts, or with others than those of the tokens.
    pub(super) fn read_all(
        &self,
        kind: EngineKind,
        parts: Vec<EngineCompletion>,
        before: impl Fn(usize) -> usize,
    ) -> Result<Vec<(EngineCompletion, Option<TokenExperts>)>, EngineFailure> {
        let mut all = Vec::with_capacity(parts.len());
        for (number, mut part) in parts.into_iter().enumerate() {
            let read = match part.experts.take() {
                Some(text) => Some(self.read(kind, &text, before(number) + part.token_ids.len())),
                // It was stopped before its first token.
                None if part.token_ids.is_empty() && part.end == EngineEnd::Aborted => None,
                None => Some(Err(format!("no `routed_experts`; {}", kind.start_with_experts()))),
            };
            let refused = |what| EngineFailure::Refused(format!("answers with {what}"));
            all.push((part, read.transpose().map_err(refused)?));
        }
        Ok(all)
    }

    /// The experts of a sequence of `tokens` tokens in the answer `text` of an engine.
    ///
    /// # Errors
    /// Another size or form than that of the sequence.
    fn read(&self, kind: EngineKind, text: &str, tokens: usize) -> Result<TokenExperts, String> {
        let shape = [tokens.saturating_sub(1), self.routed.len(), self.per_token];
        let numbers: usize = shape.iter().product();
        let longest = (4 * numbers + MAX_HEADER).div_ceil(3) * 4;
        if text.len() > longest {
            let found = text.len();
            return Err(format!(
                "`routed_experts` of {found} characters for {tokens} tokens, at most {longest} are expected"
            ));
        }
        let bytes =
            STANDARD.decode(text).map_err(|error| format!("`routed_experts` that is no base64: {error}"))?;
        let (width, values) = match kind {
            EngineKind::Vllm => array(&bytes, shape)?,
            EngineKind::Sglang => (4, &bytes[..]),
        };
        if values.len() != numbers * width {
            let found = values.len();
            return Err(format!(
                "`routed_experts` of {found} bytes, but {shape:?} numbers of {width} bytes are expected"
            ));
        }
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte));
        let mut ids = Vec::with_capacity(numbers);
        for (place, chosen) in values.chunks_exact(width * self.per_token).enumerate() {
            if !self.routed[place % self.routed.len()] {
                continue;
            }
            let first = ids.len();
            for expert in chosen.chunks_exact(width).map(number) {
                if expert >= self.count {
                    return Err(format!("the expert {expert} of {} in `routed_experts`", self.count));
                }
                ids.push(expert as u16);
            }
            ids[first..].sort_unstable();
            if ids[first..].windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(format!("one expert twice for a token in `routed_experts`: {:?}", &ids[first..]));
            }
        }
        Ok(TokenExperts { per_token: self.per_token as u32, ids })
    }
}

/// The size of a number in a file of NumPy, and its numbers, which have the shape `shape`.
fn array(bytes: &[u8], shape: [usize; 3]) -> Result<(usize, &[u8]), String> {
    let wrong = || "`routed_experts` that is no file of NumPy".to_owned();
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or_else(wrong)?;
    let (version, rest) = rest.split_first_chunk::<2>().ok_or_else(wrong)?;
    let (length, rest) = match version[0] {
        1 => rest.split_first_chunk().map(|(length, rest)| (usize::from(u16::from_le_bytes(*length)), rest)),
        _ => rest.split_first_chunk().map(|(length, rest)| (u32::from_le_bytes(*length) as usize, rest)),
    }
    .ok_or_else(wrong)?;
    let (header, values) = rest.split_at_checked(length).ok_or_else(wrong)?;
    let header = String::from_utf8_lossy(header);
    let has = |entry: &str| header.contains(entry);
    let [tokens, layers, per_token] = shape;
    if !has("'fortran_order': False") || !has(&format!("'shape': ({tokens}, {layers}, {per_token})")) {
        return Err(format!("`routed_experts` {}, but the shape {shape:?} is expected", header.trim_end()));
    }
    let types = [("'descr': '|u1'", 1), ("'descr': '<u2'", 2), ("'descr': '<i4'", 4)];
    let width = types.into_iter().find(|(entry, _)| has(entry)).map(|(_, width)| width);
    width.map(|width| (width, values)).ok_or_else(|| {
        format!("`routed_experts` {}, but numbers of u8, u16 or i32 are expected", header.trim_end())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `base64(numpy.save(array))` of `[[[3, 0], [1, 2]], [[2, 1], [0, 3]]]` as uint8, written by NumPy 2.4.
    const FILE: &str = "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoDAAECAgEAAw==";

    fn layers(routed: [bool; 2]) -> RoutedLayers {
        RoutedLayers { routed: routed.to_vec(), per_token: 2, count: 4 }
    }

    #[test]
    fn files_of_numpy_are_read() {
        let read = |routed, tokens| layers(routed).read(EngineKind::Vllm, FILE, tokens);
        let all = TokenExperts { per_token: 2, ids: vec![0, 3, 1, 2, 1, 2, 0, 3] };
        assert_eq!(read([true, true], 3), Ok(all));
        // The first layer has a dense network, whose numbers mean nothing.
        assert_eq!(read([false, true], 3), Ok(TokenExperts { per_token: 2, ids: vec![1, 2, 0, 3] }));
        for tokens in [2, 4] {
            assert!(read([true, true], tokens).unwrap_err().contains("the shape"), "{tokens} tokens");
        }
        let few = RoutedLayers { count: 3, ..layers([true, true]) };
        assert!(few.read(EngineKind::Vllm, FILE, 3).unwrap_err().contains("the expert 3 of 3"));
    }

    #[test]
    fn numbers_alone_are_read() {
        let encoded = |numbers: &[i32]| {
            STANDARD.encode(numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>())
        };
        let read = |text: &str| layers([true, true]).read(EngineKind::Sglang, text, 2);
        assert_eq!(read(&encoded(&[3, 1, 0, 2])), Ok(TokenExperts { per_token: 2, ids: vec![1, 3, 0, 2] }));
        assert!(read(&encoded(&[3, 1])).unwrap_err().contains("of 8 bytes"));
        assert!(read(&encoded(&[3, 3, 0, 2])).unwrap_err().contains("twice"));
        assert!(read(&encoded(&[-1, 3, 0, 2])).unwrap_err().contains("the expert"));
        assert!(read("?").unwrap_err().contains("no base64"));
        assert!(read(&"A".repeat(1 << 20)).unwrap_err().contains("characters"));
    }

    #[test]
    fn damaged_files_are_errors() {
        let bytes = STANDARD.decode(FILE).unwrap();
        for end in 0..bytes.len() {
            let text = STANDARD.encode(&bytes[..end]);
            assert!(layers([true, true]).read(EngineKind::Vllm, &text, 3).is_err(), "{end} bytes");
        }
    }
}
