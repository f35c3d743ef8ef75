//! The part of cnorm_model.h that the safe functions use.
use std::os::raw::{c_char, c_int, c_uchar, c_void};

#[repr(C)]
pub struct Model {
    pub networks: *const c_void,
    pub count: c_int,
    pub inputs: isize,
    pub outputs: isize,
    pub identity: *const c_uchar,
    pub configuration: *const c_char,
    pub configuration_bytes: isize,
    pub file: *const c_void,
    pub file_bytes: isize,
}

#[repr(C)]
pub struct Fault {
    pub network: c_int,
    pub layer: c_int,
    pub field: *const c_char,
}

#[repr(C)]
pub struct Stream {
    pub model: *const Model,
    pub state: *mut f32,
    pub scratch: *mut f32,
    pub rows: isize,
    pub frames: u64,
}

pub const CNORM_ABI_VERSION: c_int = 2;

extern "C" {
    pub fn cnorm_abi_version() -> c_int;
    pub fn cnorm_strerror(status: c_int) -> *const c_char;
    pub fn cnorm_model_memory(file: *const c_void, file_bytes: isize) -> isize;
    pub fn cnorm_model_open(file: *const c_void, file_bytes: isize, memory: *mut c_void, memory_bytes: isize, model: *mut Model, fault: *mut Fault) -> c_int;
    pub fn cnorm_stream_floats(model: *const Model, rows: isize) -> isize;
    pub fn cnorm_stream_start(stream: *mut Stream, model: *const Model, memory: *mut f32, rows: isize) -> c_int;
    pub fn cnorm_stream_run(stream: *mut Stream, steps: isize, x: *const f32, y: *mut f32) -> c_int;
    pub fn cnorm_stream_finite(stream: *const Stream) -> c_int;
    pub fn cnorm_stream_reset(stream: *mut Stream);
    pub fn cnorm_stream_saved_bytes(model: *const Model) -> isize;
    pub fn cnorm_stream_save(stream: *const Stream, bytes: *mut c_void) -> c_int;
    pub fn cnorm_stream_restore(stream: *mut Stream, bytes: *const c_void, count: isize) -> c_int;
}
