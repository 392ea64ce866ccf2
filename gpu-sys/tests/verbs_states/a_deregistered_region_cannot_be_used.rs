use gpu_sys::verbs::MemoryRegion;

fn key_of(region: MemoryRegion) -> u32 {
    drop(region.deregister());
    region.rkey()
}

fn main() {}
