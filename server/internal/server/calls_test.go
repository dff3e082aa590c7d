package server_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// freeze makes time stand still, so that answers are exact.
const freeze = "create or replace function ratelimit.clock() returns timestamptz language sql stable as $$ select timestamptz '2030-01-01 00:00:00+00' $$"

func TestGRPC_EachCall(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, freeze)
	s := start(t, db.URL)
	ctx := t.Context()
	same := func(want, got proto.Message, err error) {
		t.Helper()
		require.NoError(t, err)
		require.True(t, proto.Equal(want, got), "want %v\ngot  %v", want, got)
	}
	day := 24 * time.Hour
	left := func(verdict pb.Verdict, remaining int64, retryAfter time.Duration) *pb.Decision {
		return &pb.Decision{
			Verdict: verdict, Remaining: remaining, Capacity: 10,
			RetryAfter: durationpb.New(retryAfter), ResetAfter: durationpb.New(time.Duration(10-remaining) * day),
		}
	}

	d, err := s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
	same(left(pb.Verdict_ALLOWED, 9, 0), d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](4), RequestId: ptr("r")})
	same(left(pb.Verdict_ALLOWED, 5, 0), d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](4), RequestId: ptr("r")})
	replay := left(pb.Verdict_ALLOWED, 5, 0)
	replay.Replayed = true
	same(replay, d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](7)})
	same(left(pb.Verdict_DENIED, 5, 2*day), d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](0)})
	same(left(pb.Verdict_ALLOWED, 5, 0), d, err)
	d, err = s.rpc.Peek(ctx, &pb.PeekRequest{Policy: "api", LogicalKey: "k"})
	same(left(pb.Verdict_ALLOWED, 5, 0), d, err)
	d, err = s.rpc.Settle(ctx, &pb.SettleRequest{Policy: "api", LogicalKey: "k", RequestId: ptr("r"), Cost: ptr[int64](1)})
	same(left(pb.Verdict_ALLOWED, 8, 0), d, err)
	d, err = s.rpc.Charge(ctx, &pb.ChargeRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](9)})
	same(left(pb.Verdict_ALLOWED, -1, 0), d, err)
	d, err = s.rpc.Refund(ctx, &pb.RefundRequest{Policy: "api", LogicalKey: "k", Amount: ptr[int64](5)})
	same(left(pb.Verdict_ALLOWED, 4, 0), d, err)

	never := left(pb.Verdict_DENIED, 4, 0)
	never.RetryAfter = nil
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "api", LogicalKey: "k", Cost: ptr[int64](11)})
	same(never, d, err)
	d, err = s.rpc.Acquire(ctx, &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
	same(&pb.Decision{Verdict: pb.Verdict_ALLOWED, Remaining: 999_999, Capacity: 1_000_000, RetryAfter: durationpb.New(0)}, d, err)

	whole, err := s.rpc.AcquireAll(ctx, &pb.AcquireAllRequest{Charges: []*pb.Charge{
		{Policy: "budget", LogicalKey: "k"}, {Policy: "api", LogicalKey: "k", Cost: ptr[int64](3)},
	}})
	same(&pb.JointDecision{Whole: left(pb.Verdict_ALLOWED, 1, 0), Binding: 1, Decisions: []*pb.Decision{
		{Verdict: pb.Verdict_ALLOWED, Remaining: 999_998, Capacity: 1_000_000, RetryAfter: durationpb.New(0)},
		left(pb.Verdict_ALLOWED, 1, 0),
	}}, whole, err)
}

func TestJSON_EachCall(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, freeze)
	s := start(t, db.URL)
	raw := func(path, body string) string {
		t.Helper()
		response, err := s.http.Post(s.url+path, "application/x-www-form-urlencoded", strings.NewReader(body)) // as curl -d does
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode)
		require.Equal(t, "application/json", response.Header.Get("Content-Type"))
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return string(text)
	}
	db.Exec(t, "select ratelimit_define_policy('odd', 7, 3, '1 second')")
	for _, call := range [][3]string{
		{"/v1/acquire", `{"policy":"api","key":"k"}`,
			`{"allowed":true,"remaining":9,"retry_after":0,"reset_after":86400,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":4,"idempotency_key":"i"}`,
			`{"allowed":true,"remaining":5,"retry_after":0,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":4,"idempotency_key":"i"}`,
			`{"allowed":true,"remaining":5,"retry_after":0,"reset_after":432000,"capacity":10,"replayed":true,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":7,"idempotency_key":null}`,
			`{"allowed":false,"remaining":5,"retry_after":172800,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"api","key":"k","cost":11}`,
			`{"allowed":false,"remaining":5,"retry_after":null,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"odd","key":"k","cost":5}`,
			`{"allowed":true,"remaining":2,"retry_after":0,"reset_after":1.666667,"capacity":7,"replayed":false,"shadowed":false}`},
		{"/v1/peek", `{"policy":"odd","key":"k","cost":5}`,
			`{"allowed":false,"remaining":2,"retry_after":1,"reset_after":1.666667,"capacity":7,"replayed":false,"shadowed":false}`},
		{"/v1/settle", `{"policy":"api","key":"k","idempotency_key":"i","cost":0}`,
			`{"allowed":true,"remaining":9,"retry_after":0,"reset_after":86400,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/charge", `{"policy":"api","key":"k","cost":12}`,
			`{"allowed":true,"remaining":-3,"retry_after":0,"reset_after":1123200,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/refund", `{"policy":"api","key":"k","amount":8}`,
			`{"allowed":true,"remaining":5,"retry_after":0,"reset_after":432000,"capacity":10,"replayed":false,"shadowed":false}`},
		{"/v1/acquire", `{"policy":"budget","key":"k"}`,
			`{"allowed":true,"remaining":999999,"retry_after":0,"reset_after":null,"capacity":1000000,"replayed":false,"shadowed":false}`},
		{"/v1/acquire_all", `{"charges":[{"policy":"budget","key":"k"},{"policy":"api","key":"k","cost":2}],"idempotency_key":"all"}`,
			`{"allowed":true,"remaining":3,"retry_after":0,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false,"binding":1,"decisions":[` +
				`{"allowed":true,"remaining":999998,"retry_after":0,"reset_after":null,"capacity":1000000,"replayed":false,"shadowed":false},` +
				`{"allowed":true,"remaining":3,"retry_after":0,"reset_after":604800,"capacity":10,"replayed":false,"shadowed":false}]}`},
	} {
		require.Equal(t, call[2]+"\n", raw(call[0], call[1]), call[1])
	}
}
