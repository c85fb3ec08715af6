//! The integer product on AMX tiles: one instruction multiplies 16 rows of 64 inputs with their weights for 16 outputs (Intel 64
//! and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
//!
//! Invariant: sums are the exact `i32`s of the other instruction sets. Neither operand is packed again: 16 steps of a line have the
//! form of a tile of weights, and 16 rows that of a tile of inputs. So the inputs of a layer have to fill whole tiles.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::super::dot::{LINE, PANEL, PANEL_WIDTH, PanelLine, TilePlacement, finish};
use super::super::gemm::ProductOut;
use super::dot::Int8Product;

/// Rows of a tile.
const ROWS: usize = 16;
/// Steps of a tile, of four inputs each.
const STEPS: usize = 16;
/// Tiles of sums: two of rows by two of outputs.
const SUMS: usize = 4;

/// Whether layers with `steps` steps can be multiplied.
pub(super) fn fits(steps: usize) -> bool {
    steps.is_multiple_of(STEPS)
}

/// Whether the machine has the instructions, and the system lets this process use them.
pub(super) fn is_here() -> bool {
    static HERE: OnceLock<bool> = OnceLock::new();
    *HERE.get_or_init(|| has_instructions() && is_allowed())
}

/// AMX-TILE and AMX-INT8, with what turns sums into results.
fn has_instructions() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    let has = |bits: u32| __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & bits == bits;
    has(TILE | INT8) && is_x86_feature_detected!("avx512f")
}

/// Linux gives the registers, 8 KiB for every thread, to processes that ask for them.
#[cfg(target_os = "linux")]
fn is_allowed() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    #[expect(unsafe_code, reason = "the call changes nothing but what this process may use")]
    let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    refused == 0
}

#[cfg(not(target_os = "linux"))]
fn is_allowed() -> bool {
    false
}

/// The shapes of all tiles, as `ldtilecfg` reads them: 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
#[repr(C, align(64))]
struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row.
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileShapes {
    /// Two tiles of `heights` rows each, the second perhaps of none.
    fn of(heights: [usize; 2]) -> Self {
        let [first, second] = heights.map(|height| height as u8);
        let mut shapes = Self { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        shapes.rows[..8].copy_from_slice(&[first, first, second, second, first, second, 16, 16]);
        for (bytes, rows) in shapes.bytes.iter_mut().zip(shapes.rows) {
            *bytes = if rows > 0 { 64 } else { 0 };
        }
        shapes
    }
}

/// The sums of four tiles: `[rows, outputs]` of rows 0 to 15 and outputs 0 to 15, of outputs 16 to 31, then of rows 16 to 31.
#[repr(C, align(64))]
struct TileSums([[[i32; LINE]; ROWS]; SUMS]);

/// What four tiles of sums are computed from.
struct TileOperands<'a> {
    /// `[rows, 4 * steps]` bytes: up to 32 rows.
    inputs: &'a [[u8; 4]],
    /// `[steps]`: a panel.
    lines: &'a [[PanelLine<[i8; 4]>; PANEL]],
    /// The first of two lines.
    line: usize,
    /// Whether the same lines of the next panel are fetched on the way.
    ahead: bool,
}

impl TileOperands<'_> {
    /// Where the inputs, the weights and what is fetched begin; the last need not exist.
    fn addresses(&self, step_bytes: usize) -> (*const u8, *const u8, *const u8) {
        let steps = self.lines.len();
        assert!(steps > 0 && fits(steps) && self.line + 2 <= PANEL, "the lines are those of a panel");
        let weights = std::ptr::from_ref(&self.lines[0][self.line]).cast::<u8>();
        let next = if self.ahead { weights.wrapping_add(steps * step_bytes) } else { weights };
        (self.inputs.as_ptr().cast(), weights, next)
    }
}

/// Stores the product in `out`.
///
/// # Panics
/// If the machine has no AMX, or the inputs do not fill tiles.
#[target_feature(enable = "avx512f")]
pub(super) fn product(product: Int8Product<'_>, out: &mut ProductOut<'_>) {
    let steps = product.layer.steps();
    assert!(is_here() && fits(steps), "{steps} steps do not fill tiles");
    let (height, width) = (product.rows.ranges.len(), out.width());
    let panels = width.div_ceil(PANEL_WIDTH);
    let lines = &product.layer.lines[product.panel * steps..][..panels * steps];
    let mut sums = TileSums([[[0; LINE]; ROWS]; SUMS]);
    let mut shaped = [0; 2];
    for (panel, lines) in lines.chunks_exact(steps).enumerate() {
        for row in (0..height).step_by(2 * ROWS) {
            let heights = [ROWS.min(height - row), ROWS.min((height - row).saturating_sub(ROWS))];
            if shaped != heights {
                configure(&TileShapes::of(heights));
                shaped = heights;
            }
            let inputs = &product.rows.values[row * steps..][..(heights[0] + heights[1]) * steps];
            for line in (0..PANEL).step_by(2) {
                let column = panel * PANEL_WIDTH + line * LINE;
                if column >= width {
                    break;
                }
                multiply(&TileOperands { inputs, lines, line, ahead: row == 0 }, &mut sums);
                for (tile, sums) in sums.0.iter().enumerate() {
                    let (row, column) = (row + tile / 2 * ROWS, column + tile % 2 * LINE);
                    for (r, sums) in sums[..heights[tile / 2]].iter().enumerate() {
                        let first_column = product.panel * PANEL_WIDTH;
                        let place =
                            TilePlacement { column, first_column, row: row + r, store: product.store };
                        finish(&product, [[*sums]], place, out);
                    }
                }
            }
        }
    }
    release();
}

fn configure(shapes: &TileShapes) {
    #[expect(unsafe_code, reason = "the shapes are valid, and no other code uses tiles")]
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, readonly, preserves_flags));
    }
}

fn release() {
    #[expect(unsafe_code, reason = "no other code uses tiles")]
    unsafe {
        asm!("tilerelease", options(nostack, nomem, preserves_flags));
    }
}

/// All inputs of the rows with two lines, by the tiles that are configured.
fn multiply(operands: &TileOperands<'_>, sums: &mut TileSums) {
    let steps = operands.lines.len();
    let (row_bytes, step_bytes) = (4 * steps, PANEL * size_of::<PanelLine<[i8; 4]>>());
    let (first, weights, next) = operands.addresses(step_bytes);
    let sums = sums.0.as_mut_ptr().cast::<u8>();
    macro_rules! tiles {
        ($([$second:literal])* ; $([$load:literal])* ; $([$product:literal])* ; $([$store:literal])*) => {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                $($second,)*
                "2:",
                "tileloadd tmm4, [{rows} + {row}*1]",
                "tileloadd tmm6, [{lines} + {step}*1]",
                "tileloadd tmm7, [{lines} + {step}*1 + 64]",
                "tdpbusd tmm0, tmm4, tmm6",
                "tdpbusd tmm1, tmm4, tmm7",
                $($load,)*
                $($product,)*
                "mov {count:e}, 16",
                "3:",
                "prefetcht1 [{next}]",
                "prefetcht1 [{next} + 64]",
                "add {next}, {step}",
                "dec {count:e}",
                "jnz 3b",
                "add {rows}, 64",
                "add {more}, 64",
                "add {lines}, 4096",
                "dec {tiles}",
                "jnz 2b",
                "mov {tiles:e}, 64",
                "tilestored [{sums} + {tiles}*1], tmm0",
                "tilestored [{sums} + {tiles}*1 + 1024], tmm1",
                $($store,)*
                rows = inout(reg) first => _,
                more = inout(reg) first.wrapping_add(ROWS * row_bytes) => _,
                row = in(reg) row_bytes,
                lines = inout(reg) weights => _,
                next = inout(reg) next => _,
                step = in(reg) step_bytes,
                tiles = inout(reg) steps / STEPS => _,
                count = out(reg) _,
                sums = in(reg) sums,
                options(nostack),
            )
        };
    }
    if operands.inputs.len() > ROWS * steps {
        #[expect(
            unsafe_code,
            reason = "tiles cover the rows and the lines that are borrowed here, and the sums"
        )]
        unsafe {
            tiles!(
                ["tilezero tmm2"] ["tilezero tmm3"];
                ["tileloadd tmm5, [{more} + {row}*1]"];
                ["tdpbusd tmm2, tmm5, tmm6"] ["tdpbusd tmm3, tmm5, tmm7"];
                ["tilestored [{sums} + {tiles}*1 + 2048], tmm2"] ["tilestored [{sums} + {tiles}*1 + 3072], tmm3"]
            );
        }
    } else {
        #[expect(
            unsafe_code,
            reason = "tiles cover the rows and the lines that are borrowed here, and the sums"
        )]
        unsafe {
            tiles!(;;;);
        }
    }
}
