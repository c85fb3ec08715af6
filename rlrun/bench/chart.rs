//! A curve as an SVG picture, both axes logarithmic.
//!
//! Invariant: plain text that any browser shows; every point carries its numbers.

use std::fmt::Write;

/// Width and height of the picture, and the margin that the words stand in, pixels.
const SIZE: (f64, f64) = (720.0, 420.0);
const MARGIN: f64 = 60.0;

/// The picture of `points` (x, y), all above 0, in ascending order of x.
#[must_use]
pub fn svg(points: &[(f64, f64)], x_words: &str, y_words: &str) -> String {
    let (width, height) = SIZE;
    let xs = Axis::over(points.iter().map(|point| point.0));
    let ys = Axis::over(points.iter().map(|point| point.1));
    let place = |(x, y): (f64, f64)| {
        (
            MARGIN + xs.share(x) * (width - 2.0 * MARGIN),
            height - MARGIN - ys.share(y) * (height - 2.0 * MARGIN),
        )
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\" text-anchor=\"middle\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let line: Vec<String> =
        points.iter().map(|point| place(*point)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "<polyline points=\"{}\" fill=\"none\" stroke=\"black\"/>", line.join(" "));
    for point in points {
        let (x, y) = place(*point);
        let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\">{:.3}</text>", y - 8.0, point.1);
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\">{}</text>", height - MARGIN + 20.0, point.0);
    }
    let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{x_words}</text>", width / 2.0, height - 12.0);
    let _ = writeln!(
        out,
        "<text transform=\"translate(18 {:.1}) rotate(-90)\">{y_words}</text>\n</svg>",
        height / 2.0
    );
    out
}

/// A logarithmic axis from the smallest to the largest value.
#[derive(Clone, Copy, Debug)]
struct Axis {
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>) -> Self {
        let start = Self { from: f64::INFINITY, to: f64::NEG_INFINITY };
        values.fold(start, |axis, value| Self { from: axis.from.min(value), to: axis.to.max(value) })
    }

    /// Where `value` lies, from 0 to 1; in the middle if there is only one value.
    fn share(self, value: f64) -> f64 {
        if self.from < self.to { (value / self.from).ln() / (self.to / self.from).ln() } else { 0.5 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_lie_between_the_corners_in_logarithmic_distance() {
        let chart = svg(&[(1.0, 8.0), (16.0, 2.0), (256.0, 0.5)], "batch", "ms");
        assert!(chart.contains("points=\"60.0,60.0 360.0,210.0 660.0,360.0\""), "{chart}");
        assert!(
            chart.contains(">8.000</text>") && chart.contains(">256</text>") && chart.contains(">batch<")
        );
        assert!(svg(&[(4.0, 1.0)], "", "").contains("cx=\"360.0\" cy=\"210.0\""));
    }
}
