//! Pixels to draw on: lines, discs and letters with smooth edges.
//!
//! Invariant: what lies outside of the canvas is left out. A place with whole numbers is the middle of a pixel.

use std::convert::Infallible;

use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind,
};

use super::{letters, png};

/// Units of a glyph in the size of a font.
const UNITS: f64 = 10.5;
/// Width of the strokes of letters, in units of a glyph.
const STROKE: f64 = 0.95;

/// Result of drawing, which cannot fail.
type CanvasResult = Result<(), DrawingErrorKind<Infallible>>;

/// A picture in memory.
#[derive(Debug)]
pub(crate) struct Canvas {
    size: (u32, u32),
    /// `[height * width * 3]` red, green and blue.
    pixels: Vec<u8>,
}

/// A canvas that plotters draws on.
#[derive(Debug)]
pub(crate) struct CanvasBackend<'a>(pub(crate) &'a mut Canvas);

impl Canvas {
    /// A white canvas of this width and height, pixels.
    pub(crate) fn new(size: (u32, u32)) -> Self {
        Self { size, pixels: vec![255; 3 * size.0 as usize * size.1 as usize] }
    }

    /// The picture as a PNG file.
    pub(crate) fn png(&self) -> Vec<u8> {
        png::encode(self.size, &self.pixels)
    }

    /// Covers a share of a pixel with a color.
    fn blend(&mut self, (x, y): (i64, i64), color: BackendColor, share: f64) {
        let (width, height) = (i64::from(self.size.0), i64::from(self.size.1));
        if !(0..width).contains(&x) || !(0..height).contains(&y) {
            return;
        }
        let share = (share * color.alpha).clamp(0.0, 1.0);
        let at = 3 * (y * width + x) as usize;
        for (pixel, new) in self.pixels[at..at + 3].iter_mut().zip([color.rgb.0, color.rgb.1, color.rgb.2]) {
            *pixel = (f64::from(*pixel) + share * (f64::from(new) - f64::from(*pixel))).round() as u8;
        }
    }

    /// A line with round ends. Its two ends may be equal.
    fn line(&mut self, from: (f64, f64), to: (f64, f64), pen: Pen) {
        let reach = pen.width / 2.0 + 1.0;
        let span = |a: f64, b: f64, size: u32| {
            let least = (a.min(b) - reach).floor().max(0.0) as i64;
            let most = (a.max(b) + reach).ceil().min(f64::from(size)) as i64;
            least..=most
        };
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let length = dx * dx + dy * dy;
        for y in span(from.1, to.1, self.size.1) {
            for x in span(from.0, to.0, self.size.0) {
                let (px, py) = (x as f64 - from.0, y as f64 - from.1);
                let along = if length > 0.0 { ((px * dx + py * dy) / length).clamp(0.0, 1.0) } else { 0.0 };
                let distance = (px - along * dx).hypot(py - along * dy);
                let share = (pen.width / 2.0 + 0.5 - distance).clamp(0.0, 1.0);
                if share > 0.0 {
                    self.blend((x, y), pen.color, share);
                }
            }
        }
    }
}

/// Width of a text in a font of this size, pixels.
pub(super) fn text_width(text: &str, size: i32) -> i32 {
    pixels(letters::width(text), f64::from(size)) as i32
}

/// Pixels of a length in units of glyphs, in a font of this size.
fn pixels(units: f64, size: f64) -> u32 {
    (units * size / UNITS).ceil() as u32
}

/// Color and width of a line.
#[derive(Clone, Copy)]
struct Pen {
    color: BackendColor,
    /// Pixels.
    width: f64,
}

fn exact(place: BackendCoord) -> (f64, f64) {
    (f64::from(place.0), f64::from(place.1))
}

impl DrawingBackend for CanvasBackend<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        self.0.size
    }

    fn ensure_prepared(&mut self) -> CanvasResult {
        Ok(())
    }

    fn present(&mut self) -> CanvasResult {
        Ok(())
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> CanvasResult {
        self.0.blend((i64::from(point.0), i64::from(point.1)), color, 1.0);
        Ok(())
    }

    fn draw_line<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        to: BackendCoord,
        style: &S,
    ) -> CanvasResult {
        let pen = Pen { color: style.color(), width: f64::from(style.stroke_width()) };
        self.0.line(exact(from), exact(to), pen);
        Ok(())
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> CanvasResult {
        let mut points = path.into_iter();
        let Some(mut from) = points.next() else { return Ok(()) };
        for to in points {
            self.draw_line(from, to, style)?;
            from = to;
        }
        Ok(())
    }

    fn draw_circle<S: BackendStyle>(
        &mut self,
        center: BackendCoord,
        radius: u32,
        style: &S,
        fill: bool,
    ) -> CanvasResult {
        let diameter = 2.0 * f64::from(radius);
        self.0.line(exact(center), exact(center), Pen { color: style.color(), width: diameter + 1.0 });
        if !fill {
            let white = BackendColor { alpha: 1.0, rgb: (255, 255, 255) };
            self.0.line(exact(center), exact(center), Pen { color: white, width: diameter - 1.0 });
        }
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, place: BackendCoord) -> CanvasResult {
        let unit = style.size() / UNITS;
        let width = letters::width(text);
        let left = match style.anchor().h_pos {
            HPos::Left => 0.0,
            HPos::Center => -width / 2.0,
            HPos::Right => -width,
        };
        // Glyphs have y upwards, pixels downwards.
        let top = match style.anchor().v_pos {
            VPos::Top => letters::HEIGHT,
            VPos::Center => letters::MIDDLE,
            VPos::Bottom => 0.0,
        };
        // The transformation is that of pixels; a quarter of a circle changes both signs and axes.
        let scale = 1024.0;
        let turned = |(x, y): letters::GlyphPoint| {
            let (x, y) = (unit * (left + x), unit * (top - y));
            let (x, y) = style.transform().transform((scale * x) as i32, (scale * y) as i32);
            (f64::from(place.0) + f64::from(x) / scale, f64::from(place.1) + f64::from(y) / scale)
        };
        let pen = Pen { color: style.color(), width: STROKE * unit };
        for stroke in letters::strokes(text) {
            let points: Vec<(f64, f64)> = stroke.into_iter().map(turned).collect();
            if let [dot] = points[..] {
                self.0.line(dot, dot, Pen { width: 1.5 * pen.width, ..pen });
            }
            points.windows(2).for_each(|pair| self.0.line(pair[0], pair[1], pen));
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        let size = style.size();
        Ok((pixels(letters::width(text), size), pixels(letters::HEIGHT, size)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_where_they_are_drawn_and_end_at_the_border() {
        let mut canvas = Canvas::new((20, 10));
        let red = BackendColor { alpha: 1.0, rgb: (200, 0, 0) };
        let style = |width| Pen { color: red, width };
        canvas.line((3.0, 4.0), (12.0, 4.0), style(1.0));
        canvas.line((-50.0, 8.0), (50.0, 8.0), style(3.0));
        let at = |x: usize, y: usize| canvas.pixels[3 * (20 * y + x)..][..3].to_vec();
        assert_eq!((at(7, 4), at(7, 3), at(15, 4)), (vec![200, 0, 0], vec![255; 3], vec![255; 3]));
        assert_eq!((at(0, 8), at(19, 7), at(10, 9)), (vec![200, 0, 0], vec![200, 0, 0], vec![200, 0, 0]));
        assert_eq!(at(10, 6), vec![255; 3]);
    }
}
