package server_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// manyRequests has one request for each key.
func manyRequests(policy string, keys ...string) (list []*pb.Request) {
	for _, key := range keys {
		list = append(list, &pb.Request{Policy: policy, LogicalKey: key})
	}
	return list
}

// A refusal belongs to its request, names it, and is the same by gRPC and by JSON.
func TestAcquireMany_ABadRequestDoesNotFailTheOthers(t *testing.T) {
	db, s := parallel(t)
	require.NoError(t, kit.ErrorOf(s.call(t.Context(), "acquire", `{"policy":"api","key":"k","idempotency_key":"used"}`)))
	const good = `{"policy":"api","key":"k"},`
	for bad, want := range map[string]struct {
		kind        service.Kind
		state, says string
	}{
		`{"policy":"nobody","key":"k"}`:        {service.UnknownPolicy, "RL001", "No policy is named 'nobody'"},
		`{"key":"k"}`:                          {service.UnknownPolicy, "RL001", "No policy is named 'default'"},
		`{"policy":"api","key":"k","cost":-1}`: {service.InvalidArgument, "22023", "requests[1].cost is -1"},
		`{"policy":"api"}`:                     {service.InvalidArgument, "22023", "requests[1].key is empty"},
		`{"policy":"api","key":"` + strings.Repeat("k", 513) + `"}`:    {service.InvalidArgument, "22023", "requests[1].key is 513 bytes"},
		`{"policy":"api","key":"a\u0000b"}`:                            {service.InvalidArgument, "22023", "requests[1]: "},
		`{"policy":"api","key":"k","idempotency_key":""}`:              {service.InvalidArgument, "22023", "requests[1].idempotency_key is"},
		`{"policy":"api","key":"k","cost":2,"idempotency_key":"used"}`: {service.IdempotencyMismatch, "RL002", "used before with another cost"},
	} {
		body := `{"requests":[` + good + bad + `,{"policy":"budget","key":"k"}]}`
		db.Exec(t, "select ratelimit_reset('api', 'k')")
		out := kit.NoError(s.call(t.Context(), "acquire_many", body))(t)
		answers := out.(*pb.Answers).GetAnswers()
		require.Len(t, answers, 3)
		require.Equal(t, pb.Verdict_ALLOWED, answers[0].GetDecision().GetVerdict())
		require.Equal(t, pb.Verdict_ALLOWED, answers[2].GetDecision().GetVerdict())
		e := answers[1].GetError()
		require.Equal(t, []any{int32(want.kind.Code()), want.kind.Reason(), want.state}, []any{e.GetCode(), e.GetReason(), e.GetSqlstate()}, "%s: %v", bad, e)
		require.Contains(t, e.GetMessage(), want.says)

		a := s.mustPost("/v1/acquire_many", body)
		require.Equal(t, http.StatusOK, a.status)
		inJSON := a.body["answers"].([]any)
		require.NotContains(t, inJSON[0], "error")
		problem := inJSON[1].(map[string]any)["error"].(map[string]any)
		require.EqualValues(t, want.kind.Status(), problem["status"])
		require.Equal(t, want.state, problem["sqlstate"])
		require.Contains(t, fmt.Sprint(problem["title"], problem["detail"]), want.says)
	}
}

// A thousand requests in one message are a few calls to the database: each takes 256, or at least half of those that wait.
func TestAcquireMany_RequestsShareCalls(t *testing.T) {
	db, s := parallel(t)
	var keys []string
	for i := range 1000 {
		keys = append(keys, fmt.Sprint("k", i))
	}
	out := kit.NoError(s.rpc.AcquireMany(t.Context(), &pb.AcquireManyRequest{Requests: manyRequests("budget", keys...)}))(t)
	for i, a := range out.GetAnswers() {
		require.EqualValues(t, 999_999, a.GetDecision().GetRemaining(), keys[i])
	}
	require.EqualValues(t, 1000, taken(t, db))
	samples := scrape(s)
	require.Equal(t, "1000", samples[`ratelimit_requests_total{policy="budget",result="allowed"}`])
	require.Equal(t, "1000", samples[`ratelimit_server_calls_total{code="OK",operation="acquire_many"}`])
	require.Equal(t, "1000", samples["ratelimit_combiner_batch_size_sum"])
	require.Contains(t, []string{"4", "5", "6", "7"}, samples["ratelimit_combiner_batch_size_count"])
}

// A stream is one of AcquireStream, whose answers come by their ids.
type stream struct {
	t testing.TB
	pb.RateLimiter_AcquireStreamClient
}

func (s *testServer) stream(ctx context.Context) stream {
	conn := kit.NoError(s.rpc.AcquireStream(ctx))(s.t)
	return stream{s.t, conn}
}

func (s stream) send(id uint64, keys ...string) {
	require.NoError(s.t, s.Send(&pb.AcquireStreamRequest{Id: id, Requests: manyRequests("budget", keys...)}))
}

// granted reads an answer, all of whose decisions are grants, and returns its id.
func (s stream) granted() uint64 {
	out := kit.NoError(s.Recv())(s.t)
	require.NotEmpty(s.t, out.GetAnswers())
	for _, a := range out.GetAnswers() {
		require.Equal(s.t, pb.Verdict_ALLOWED, a.GetDecision().GetVerdict(), "%v", out)
	}
	return out.GetId()
}

func TestStream_ALockedBucketHoldsUpItsOwnMessageOnly(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	unlock := hold(t, db, "select ratelimit_acquire('budget', 'locked')")
	s := start(t, db.URL)
	stream := s.stream(t.Context())
	stream.send(7, "free", "locked")
	awaitBlocked(t, db, 1)
	for id := range uint64(5) {
		stream.send(id, "k", "l")
		require.Equal(t, id, stream.granted())
	}
	unlock()
	require.EqualValues(t, 7, stream.granted())
	require.NoError(t, stream.CloseSend())
	_, err := stream.Recv()
	require.Equal(t, io.EOF, err)
	require.EqualValues(t, 12, taken(t, db))
}

// The stream ends without an error when all messages before the half-close are answered.
func TestStream_HalfCloseIsAnsweredToTheEnd(t *testing.T) {
	db, s := parallel(t)
	stream := s.stream(t.Context())
	unlock := lock(t, db)
	const messages = 20
	for id := range uint64(messages) {
		stream.send(id, "k")
	}
	require.NoError(t, stream.CloseSend())
	awaitBlocked(t, db, 1)
	unlock()
	ids := map[uint64]bool{}
	for range messages {
		ids[stream.granted()] = true
	}
	require.Len(t, ids, messages)
	_, err := stream.Recv()
	require.Equal(t, io.EOF, err)
}

func TestStream_CancelEndsTheWorkOfTheDatabase(t *testing.T) {
	db, s := parallel(t)
	defer lock(t, db)()
	ctx, leave := context.WithCancel(t.Context())
	stream := s.stream(ctx)
	stream.send(1, "k", "l")
	awaitBlocked(t, db, 1)
	leave()
	awaitBlocked(t, db, 0)
	_, err := stream.Recv()
	require.Equal(t, codes.Canceled, status.Code(err))
}

// A server that stops answers what it has read, and says that it has not read the rest.
func TestStream_StopAnswersWhatWasRead(t *testing.T) {
	db, s := parallel(t)
	stream, idle := s.stream(t.Context()), s.stream(t.Context())
	idle.send(1, "idle")
	require.EqualValues(t, 1, idle.granted())
	unlock := lock(t, db)
	stream.send(1, "k")
	awaitBlocked(t, db, 1)
	stopped := beside(s.stop)
	_, err := idle.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	requireInfo(t, err, "STOPPING", "")
	_ = stream.Send(&pb.AcquireStreamRequest{Id: 2, Requests: manyRequests("budget", "k")}) // the stream may have ended
	require.Empty(t, stopped)
	unlock()
	require.EqualValues(t, 1, stream.granted())
	_, err = stream.Recv()
	requireInfo(t, err, "STOPPING", "")
	require.NoError(t, <-stopped)
	require.EqualValues(t, 2, taken(t, db), "what has no answer has taken nothing")
}

// Without the bound, MAX_CALLS would refuse messages.
func TestStream_IsReadNoFurtherWhileAHundredMessagesAreUnderWay(t *testing.T) {
	db, s := parallel(t, "MAX_CALLS=100")
	stream := s.stream(t.Context())
	unlock := lock(t, db)
	const messages = 300
	for id := range uint64(messages) {
		stream.send(id, "k")
	}
	require.Eventually(t, func() bool { return scrape(s)["ratelimit_server_calls_under_way"] == "100" }, time.Minute, time.Millisecond)
	unlock()
	for range messages {
		stream.granted()
	}
	require.EqualValues(t, messages, taken(t, db))
}

// A message is a call: MAX_CALLS and CALL_TIMEOUT hold for it. The stream goes on.
func TestStream_LimitsHoldForEachMessage(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	unlock := lock(t, db)
	stream := start(t, db.URL, "MAX_CALLS=1", "CALL_TIMEOUT=1m", "LOCK_TIMEOUT=1m", "MAX_MESSAGE_BYTES=100000").stream(t.Context())
	stream.send(1, "k")
	awaitBlocked(t, db, 1)
	stream.send(2, "l")
	stream.refused(2, codes.ResourceExhausted, "OVERLOADED")
	unlock()
	require.EqualValues(t, 1, stream.granted())
	stream.send(3)
	stream.refused(3, codes.InvalidArgument, "INVALID_ARGUMENT")
	stream.send(4, make([]string, 1001)...)
	stream.refused(4, codes.InvalidArgument, "INVALID_ARGUMENT")
	stream.send(5, "k")
	require.EqualValues(t, 5, stream.granted())
	stream.send(6, strings.Repeat("k", 100_000))
	_, err := stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.EqualValues(t, 2, taken(t, db))

	defer lock(t, db)()
	stream = start(t, db.URL, "CALL_TIMEOUT=50ms").stream(t.Context())
	for id := range uint64(2) {
		stream.send(id, "k")
		stream.refused(id, codes.DeadlineExceeded, "DEADLINE_EXCEEDED")
	}
}

// refused receives the error of a message, or of its only request.
func (s *stream) refused(id uint64, code codes.Code, reason string) {
	out := kit.NoError(s.Recv())(s.t)
	require.Equal(s.t, id, out.GetId())
	e := out.GetError()
	if e == nil {
		require.Len(s.t, out.GetAnswers(), 1)
		e = out.GetAnswers()[0].GetError()
	}
	require.Equal(s.t, []any{int32(code), reason}, []any{e.GetCode(), e.GetReason()}, "%v", out)
}

// Requests for the shard that is down fail. The others in the message are answered.
func TestAcquireMany_OfShardsFailsWithTheShardOfTheKeyOnly(t *testing.T) {
	t.Parallel()
	const of = 2
	dbs, setting := newShards(t, of)
	s := start(t, "", setting, "LOCK_TIMEOUT=20ms")
	defer lock(t, dbs[1])()
	keys := []string{keyOn(0, of), keyOn(1, of), keyOn(0, of)}
	out := kit.NoError(s.rpc.AcquireMany(t.Context(), &pb.AcquireManyRequest{Requests: manyRequests("api", keys...)}))(t)
	require.EqualValues(t, 9, out.GetAnswers()[0].GetDecision().GetRemaining())
	require.EqualValues(t, codes.Aborted, out.GetAnswers()[1].GetError().GetCode())
	require.EqualValues(t, 8, out.GetAnswers()[2].GetDecision().GetRemaining())
}
