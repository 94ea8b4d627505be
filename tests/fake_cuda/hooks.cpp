// Lets a torch that was built without CUDA differentiate FakeTensors whose device is "cuda".
//
// Autograd asks the registered device guard for streams, and the CUDA hooks whether there is an
// accelerator; without them the process aborts. Nothing here touches memory: fake tensors have none.
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 1;
thread_local c10::DeviceIndex current_device = 0;

c10::DeviceIndex switch_to(c10::DeviceIndex wanted) {
  const c10::DeviceIndex before = current_device;
  if (wanted >= 0) current_device = wanted;
  return before;
}

c10::Stream default_stream(c10::Device device) {
  const auto index = device.index() < 0 ? current_device : device.index();
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, index));
}

struct NoGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return c10::Device(type(), current_device); }
  c10::Device exchangeDevice(c10::Device d) const override {
    return c10::Device(type(), switch_to(d.index()));
  }
  void setDevice(c10::Device d) const override { switch_to(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { switch_to(d.index()); }

  c10::Stream getStream(c10::Device d) const noexcept override { return default_stream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return default_stream(d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return default_stream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return default_stream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return default_stream(s.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
};

// The name under which torch looks for the hooks of CUDA.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { switch_to(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return switch_to(d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return switch_to(d); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
NoGuard guard;

}  // namespace

// 1: guard and hooks are in place; 0: torch has a guard of its own, as with CUDA; -1: torch asked
// for its hooks before these were loaded.
extern "C" int install() {
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (slot.load() != nullptr) return 0;
  slot.store(&guard);
  return at::detail::getCUDAHooks().hasCUDA() ? 1 : -1;
}
