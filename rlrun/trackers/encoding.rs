//! Protocol buffers and checksums, as far as the files of trackers have them.
//!
//! Invariant: a message is only written, never read, so that no input from outside is decoded here.

/// A message of protocol buffers that is being written (<https://protobuf.dev/programming-guides/encoding>).
#[derive(Clone, Debug, Default)]
pub(super) struct ProtobufMessage {
    bytes: Vec<u8>,
}

/// How the value of a field is written.
#[derive(Clone, Copy, Debug)]
enum WireType {
    Varint = 0,
    Fixed64 = 1,
    Length = 2,
    Fixed32 = 5,
}

impl ProtobufMessage {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn tag(&mut self, field: u32, wire: WireType) {
        self.varint(u64::from(field << 3) | wire as u64);
    }

    /// A whole number that is not negative.
    pub(super) fn number(mut self, field: u32, value: u64) -> Self {
        self.tag(field, WireType::Varint);
        self.varint(value);
        self
    }

    pub(super) fn double(mut self, field: u32, value: f64) -> Self {
        self.tag(field, WireType::Fixed64);
        self.bytes.extend(value.to_le_bytes());
        self
    }

    pub(super) fn float(mut self, field: u32, value: f32) -> Self {
        self.tag(field, WireType::Fixed32);
        self.bytes.extend(value.to_le_bytes());
        self
    }

    pub(super) fn data(mut self, field: u32, value: &[u8]) -> Self {
        self.tag(field, WireType::Length);
        self.varint(value.len() as u64);
        self.bytes.extend(value);
        self
    }

    pub(super) fn text(self, field: u32, value: &str) -> Self {
        self.data(field, value.as_bytes())
    }

    pub(super) fn message(self, field: u32, value: &Self) -> Self {
        self.data(field, &value.bytes)
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// A cyclic redundancy check of 32 bits, bits reversed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crc32 {
    table: [u32; 256],
}

/// Castagnoli's polynomial, of TensorBoard.
pub(super) const CRC32C: Crc32 = Crc32::new(0x82f6_3b78);
/// The polynomial of IEEE 802.3, of W&B.
pub(super) const CRC32: Crc32 = Crc32::new(0xedb8_8320);

impl Crc32 {
    const fn new(polynomial: u32) -> Self {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut value, mut bit) = (byte as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 { (value >> 1) ^ polynomial } else { value >> 1 };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        Self { table }
    }

    pub(super) fn of(&self, parts: &[&[u8]]) -> u32 {
        let step = |crc: u32, byte: &u8| self.table[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8);
        !parts.iter().flat_map(|part| part.iter()).fold(u32::MAX, step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check values of the catalogue of parametrised CRC algorithms (reveng.sourceforge.io).
    #[test]
    fn checksums_have_their_check_values() {
        assert_eq!(CRC32.of(&[b"1234", b"56789"]), 0xcbf4_3926);
        assert_eq!(CRC32C.of(&[b"123456789"]), 0xe306_9283);
    }

    /// The examples of the encoding guide.
    #[test]
    fn messages_are_encoded_as_the_guide_says() {
        assert_eq!(ProtobufMessage::default().number(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        let text = ProtobufMessage::default().text(2, "testing").into_bytes();
        assert_eq!(text, [&[0x12, 0x07][..], b"testing"].concat());
        let inner = ProtobufMessage::default().number(1, 150);
        assert_eq!(
            ProtobufMessage::default().message(3, &inner).into_bytes(),
            [0x1a, 0x03, 0x08, 0x96, 0x01]
        );
    }
}
