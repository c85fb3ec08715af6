//! Letters as strokes, for pictures: a font of our own that needs no file and has any size.
//!
//! A glyph is strokes apart by spaces, and a stroke is points of two digits, x and y. The baseline is at y = 2, lower-case
//! letters end at 6, capitals at 8; a stroke of one point is a dot.
//!
//! Invariant: every printable ASCII character has a glyph. Other characters are shown as `?`.

/// Heights in the units of glyphs: from the lowest to the highest point.
pub(super) const HEIGHT: f64 = 8.0;
/// The middle of capitals and digits.
pub(super) const MIDDLE: f64 = 5.0;
/// Space between two glyphs.
const BETWEEN: f64 = 2.0;
/// Width of a space.
const SPACE: f64 = 2.0;

/// A point in the units of glyphs, y upwards.
pub(super) type GlyphPoint = (f64, f64);

/// The strokes of `text` from x = 0 on.
pub(super) fn strokes(text: &str) -> Vec<Vec<GlyphPoint>> {
    let mut strokes = Vec::new();
    let mut left = 0.0;
    for glyph in text.chars().map(glyph) {
        for stroke in glyph.split_ascii_whitespace() {
            strokes.push(points(stroke).map(|(x, y)| (left + x, y)).collect());
        }
        left += advance(glyph);
    }
    strokes
}

/// The width of `text`, in the units of glyphs.
pub(super) fn width(text: &str) -> f64 {
    (text.chars().map(|character| advance(glyph(character))).sum::<f64>() - BETWEEN).max(0.0)
}

fn advance(glyph: &str) -> f64 {
    let right = glyph.split_ascii_whitespace().flat_map(points).map(|(x, _)| x).fold(0.0, f64::max);
    BETWEEN + if glyph.is_empty() { SPACE } else { right }
}

fn points(stroke: &str) -> impl Iterator<Item = GlyphPoint> + '_ {
    let (pairs, _) = stroke.as_bytes().as_chunks::<2>();
    pairs.iter().map(|[x, y]| (f64::from(x - b'0'), f64::from(y - b'0')))
}

fn glyph(character: char) -> &'static str {
    let index = (character as usize).checked_sub(' ' as usize);
    index.and_then(|index| GLYPHS.get(index)).copied().unwrap_or(GLYPHS['?' as usize - ' ' as usize])
}

/// The glyphs from the space to the tilde.
const GLYPHS: [&str; 95] = [
    "",                                 // space
    "0804 02",                          // !
    "0806 2826",                        // "
    "1218 3238 0444 0646",              // #
    "473818070615354443321203 2921",    // $
    "0248 0818170708 3343423233",       // %
    "4206071827260403122244",           // &
    "0806",                             // '
    "18070312",                         // (
    "08171302",                         // )
    "2327 0446 0644",                   // *
    "2327 0545",                        // +
    "1201",                             // ,
    "0535",                             // -
    "02",                               // .
    "0238",                             // /
    "123243473818070312",               // 0
    "062822 0242",                      // 1
    "07183847460242",                   // 2
    "071838474635 1535 354443321203",   // 3
    "32380444",                         // 4
    "480805354443321203",               // 5
    "473818070312324344351504",         // 6
    "084812",                           // 7
    "15060718384746351504031232434435", // 8
    "031232434738180706153546",         // 9
    "02 05",                            // :
    "1201 15",                          // ;
    "370533",                           // <
    "0646 0444",                        // =
    "073503",                           // >
    "07183847462524 22",                // ?
    "4212030718384744242646",           // @
    "022842 1434",                      // A
    "02083847463505 3544433202",        // B
    "4738180703123243",                 // C
    "02083847433202",                   // D
    "42020848 0535",                    // E
    "020848 0535",                      // F
    "47381807031232434525",             // G
    "0208 4248 0545",                   // H
    "0222 1218 0828",                   // I
    "0312223338",                       // J
    "0208 4804 1542",                   // K
    "080242",                           // L
    "0208254842",                       // M
    "02084248",                         // N
    "123243473818070312",               // O
    "02083847463505",                   // P
    "123243473818070312 2441",          // Q
    "02083847463505 2542",              // R
    "473818070615354443321203",         // S
    "0848 2822",                        // T
    "080312324348",                     // U
    "082248",                           // V
    "0812253248",                       // W
    "0248 0842",                        // X
    "082548 2522",                      // Y
    "08480242",                         // Z
    "18080212",                         // [
    "0832",                             // backslash
    "08181202",                         // ]
    "062846",                           // ^
    "0141",                             // _
    "0817",                             // `
    "3632 3526160503122233",            // a
    "0802 0516263533221203",            // b
    "3526160503122233",                 // c
    "3832 3526160503122233",            // d
    "043435261605031232",               // e
    "281712 0626",                      // f
    "3631201001 3526160503122233",      // g
    "0802 0516263532",                  // h
    "0206 08",                          // i
    "161100 18",                        // j
    "0802 3603 1432",                   // k
    "080312",                           // l
    "0206 05162522 25364542",           // m
    "0206 0516263532",                  // n
    "051626353322120305",               // o
    "0600 0516263533221203",            // p
    "3630 3526160503122233",            // q
    "0206 051626",                      // r
    "3616051424332202",                 // s
    "181322 0626",                      // t
    "0603122233 3632",                  // u
    "062246",                           // v
    "0612243246",                       // w
    "0236 0632",                        // x
    "0622 4610",                        // y
    "06360232",                         // z
    "28171605141322",                   // {
    "0801",                             // |
    "08171625141302",                   // }
    "05163445",                         // ~
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_has_strokes_within_its_height() {
        for character in '!'..='~' {
            let strokes = strokes(&character.to_string());
            assert!(!strokes.is_empty(), "{character}");
            for (x, y) in strokes.iter().flatten() {
                assert!((0.0..=5.0).contains(x) && (0.0..=HEIGHT + 1.0).contains(y), "{character}: {x} {y}");
            }
            assert!(
                GLYPHS[character as usize - 32].split(' ').all(|stroke| stroke.len() % 2 == 0),
                "{character}"
            );
        }
        assert_eq!(strokes("\u{e9}"), strokes("?"));
        assert_eq!(
            (width(""), width("i"), width("ii"), width("o o")),
            (0.0, 0.0, 2.0, 3.0 + 2.0 + 4.0 + 3.0)
        );
    }
}
