//! PNG files (ISO/IEC 15948, third edition): 8 bits for red, green and blue.
//!
//! Invariant: a file is written whole, from pixels in memory.

use std::io::Write;

use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};

/// What every file begins with.
const SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";
/// The filter of a row: its difference from the row above, which is zero where a picture is empty.
const UP: u8 = 2;

/// The file of `pixels [height * width * 3]`.
///
/// # Panics
/// If there are fewer pixels.
pub(super) fn encode((width, height): (u32, u32), pixels: &[u8]) -> Vec<u8> {
    let row_bytes = 3 * width as usize;
    let mut rows = Vec::with_capacity((1 + row_bytes) * height as usize);
    for row in 0..height as usize {
        let at = row * row_bytes;
        let own = &pixels[at..at + row_bytes];
        rows.push(UP);
        match row {
            0 => rows.extend_from_slice(own),
            _ => rows
                .extend(own.iter().zip(&pixels[at - row_bytes..at]).map(|(own, up)| own.wrapping_sub(*up))),
        }
    }
    let mut compressed = ZlibEncoder::new(Vec::new(), Compression::default());
    let written = compressed.write_all(&rows).and_then(|()| compressed.finish());
    let data = written.expect("memory takes everything that is written");
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    // Eight bits, colors without a palette, the only compression and filter, no interlacing.
    header.extend_from_slice(&[8, 2, 0, 0, 0]);
    let mut file = SIGNATURE.to_vec();
    for (kind, content) in [(b"IHDR", &header[..]), (b"IDAT", &data), (b"IEND", &[])] {
        file.extend_from_slice(&(content.len() as u32).to_be_bytes());
        let mut sum = Crc::new();
        for part in [&kind[..], content] {
            sum.update(part);
            file.extend_from_slice(part);
        }
        file.extend_from_slice(&sum.sum().to_be_bytes());
    }
    file
}

/// Size and pixels of a file of [`encode`]; checks every sum.
#[cfg(test)]
pub(crate) fn decode(file: &[u8]) -> ((u32, u32), Vec<u8>) {
    use std::io::Read;

    let mut rest = file.strip_prefix(&SIGNATURE).unwrap();
    let mut chunks = Vec::new();
    while !rest.is_empty() {
        let length = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize;
        let (kind, content) = (&rest[4..8], &rest[8..8 + length]);
        let mut sum = Crc::new();
        sum.update(&rest[4..8 + length]);
        assert_eq!(rest[8 + length..12 + length], sum.sum().to_be_bytes());
        chunks.push((kind.to_vec(), content.to_vec()));
        rest = &rest[12 + length..];
    }
    let [(_, header), (_, data), (end, _)] = &chunks[..] else { panic!("{} chunks", chunks.len()) };
    assert_eq!((&end[..], &header[8..]), (&b"IEND"[..], &[8, 2, 0, 0, 0][..]));
    let size = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let (width, height) = (size(0), size(4));
    let mut rows = Vec::new();
    flate2::read::ZlibDecoder::new(&data[..]).read_to_end(&mut rows).unwrap();
    let row_bytes = 3 * width as usize;
    assert_eq!(rows.len(), (1 + row_bytes) * height as usize);
    let mut pixels: Vec<u8> = Vec::new();
    for row in rows.chunks(1 + row_bytes) {
        assert_eq!(row[0], UP);
        let above = pixels.len().checked_sub(row_bytes).map(|at| pixels[at..].to_vec());
        let above = above.unwrap_or_else(|| vec![0; row_bytes]);
        pixels.extend(row[1..].iter().zip(above).map(|(own, up)| own.wrapping_add(up)));
    }
    ((width, height), pixels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_pixels() {
        let pixels: Vec<u8> = (0..3 * 5 * 4).map(|at: usize| (at * at % 251) as u8).collect();
        assert_eq!(decode(&encode((5, 4), &pixels)), ((5, 4), pixels));
    }
}
