"""Every call of the service over gRPC, by reflection and without generated code.

apt-get install python3-grpcio python3-protobuf
RATELIMIT_TOKEN=… /usr/bin/python3 grpc_calls.py    # with these policies:

select ratelimit_define_policy('api', 10, 1, '1 day'), ratelimit_define_policy('budget', 1000, 0, '1 day'),
       ratelimit_define_policy('jobs', 1, lease => '1 minute');
"""
import os

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor

SERVICE = "pgratelimit.v1.RateLimiter"
channel = grpc.insecure_channel(os.environ.get("RATELIMIT_GRPC", "localhost:8081"))
options = {"timeout": 60, "metadata": [("authorization", "Bearer " + os.environ.get("RATELIMIT_TOKEN", "secret"))]}
pool = descriptor_pool.DescriptorPool()


def new(name):
    message = pool.FindMessageTypeByName(name)
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(message)
    return message_factory.MessageFactory(pool).GetPrototype(message)


def add_message(proto, name, **fields):
    message = proto.message_type.add(name=name)
    for field, (number, kind, label, type_name) in fields.items():
        message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)


# The part of grpc.reflection.v1 that asks for the files of a service.
one, many = FieldDescriptor.LABEL_OPTIONAL, FieldDescriptor.LABEL_REPEATED
reflection = descriptor_pb2.FileDescriptorProto(name="reflection.proto", package="r", syntax="proto3")
add_message(reflection, "Request", file_containing_symbol=(4, FieldDescriptor.TYPE_STRING, one, None))
add_message(reflection, "Files", file=(1, FieldDescriptor.TYPE_BYTES, many, None))
add_message(reflection, "Response", files=(4, FieldDescriptor.TYPE_MESSAGE, one, ".r.Files"))
pool.AddSerializedFile(reflection.SerializeToString())
ask = channel.stream_stream(
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", lambda q: q.SerializeToString(), new("r.Response").FromString
)
files = next(ask(iter([new("r.Request")(file_containing_symbol=SERVICE)]), **options)).files.file
for file in reversed(files):  # those that others import come last
    pool.AddSerializedFile(file)
methods = pool.FindServiceByName(SERVICE).methods_by_name


def call(name, request=None, **fields):
    method = methods[name]
    asked, answered = new(method.input_type.full_name), new(method.output_type.full_name)
    make = channel.stream_stream if name == "AcquireStream" else channel.unary_unary
    made = make(f"/{SERVICE}/{name}", lambda q: q.SerializeToString(), answered.FromString)
    return made(request(asked) if request else asked(**fields), **options)


def check(got, want):
    assert got == want, (got, want)


ALLOWED, DENIED = 1, 2
api, budget = {"policy": "api", "logical_key": "python"}, {"policy": "budget", "logical_key": "python"}

check(call("Acquire", **api, cost=8).remaining, 2)
check(call("Peek", **api).verdict, ALLOWED)
answers = call("AcquireMany", requests=[dict(api, cost=2), dict(api, policy="nobody"), api]).answers
check([a.decision.verdict if a.HasField("decision") else a.error.sqlstate for a in answers], [ALLOWED, "RL001", DENIED])
check(call("Refund", **api, amount=10).remaining, 10)
check(call("AcquireAll", charges=[api, budget]).whole.verdict, ALLOWED)
check(call("AcquireUpTo", **api, at_most=20).taken, 9)
check(call("Reserve", **api, max_wait={"seconds": 2 * 86400}).wait.seconds // 3600, 23)
check(call("Charge", **budget, cost=99, request_id="job").remaining, 900)
check(call("Settle", **budget, cost=0, request_id="job").remaining, 999)
streamed = list(call("AcquireStream", lambda message: (message(id=id, requests=[budget]) for id in range(150))))
check(sorted(r.id for r in streamed), list(range(150)))
check({a.decision.verdict for r in streamed for a in r.answers}, {ALLOWED})
check(call("Peek", **budget).remaining, 849)
check(call("Pause", **api, pause_for={"seconds": 60}).retry_after.seconds > 60, True)
try:
    call("AcquireMany")
    raise AssertionError("no error")
except grpc.RpcError as error:
    check(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
job = {"policy": "jobs", "logical_key": "python", "holder": "attempt 1"}
check(call("Hold", **job).held_for.seconds, 60)
check(call("Hold", **dict(job, holder="attempt 2")).verdict, DENIED)
check(call("Renew", **job).held_for.seconds, 60)
check(call("Release", **job).released, True)
check(call("Renew", **job).HasField("held_for"), False)
print("all calls are answered")
