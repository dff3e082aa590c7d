package grpclimit_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/grpclimit"
	"github.com/pgratelimit/pgratelimit/client/internal/failure/failuretest"
)

const secret = "secret-user-42"

func newFake(t *testing.T) *clienttest.Fake {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	fake := clienttest.New(func() time.Time { return now })
	for _, p := range []client.Policy{
		{Name: "api", Capacity: 2, Refill: 3, Every: time.Second},
		{Name: "budget", Capacity: 1, Refill: client.Zero, Every: time.Second},
	} {
		require.NoError(t, fake.DefinePolicy(t.Context(), p))
	}
	return fake
}

// serve starts a server whose calls the interceptor limits, and returns a client of it.
func serve(t *testing.T, limit *grpclimit.Interceptor) grpc_health_v1.HealthClient {
	server := grpc.NewServer(grpc.UnaryInterceptor(limit.Unary), grpc.StreamInterceptor(limit.Stream))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		require.NoError(t, <-ended)
	})
	return grpc_health_v1.NewHealthClient(conn)
}

func per(policies ...string) grpclimit.Charges {
	return func(context.Context, string) (charges []client.Charge) {
		for _, policy := range policies {
			charges = append(charges, client.Charge{Policy: policy, Key: secret})
		}
		return charges
	}
}

func check(t *testing.T, c grpc_health_v1.HealthClient) (*status.Status, metadata.MD) {
	var trailer metadata.MD
	_, err := c.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}, grpc.Trailer(&trailer))
	return status.Convert(err), trailer
}

// detail returns the detail of a type, or nil.
func detail[T any](s *status.Status) (found T) {
	for _, d := range s.Details() {
		if is, ok := d.(T); ok {
			return is
		}
	}
	return found
}

func TestUnary_ARefusalSaysHowLong(t *testing.T) {
	t.Parallel()
	c := serve(t, grpclimit.New(newFake(t), per("api"), grpclimit.Closed(time.Minute)))
	for range 2 {
		s, trailer := check(t, c)
		require.Equal(t, codes.OK, s.Code())
		require.Empty(t, trailer)
	}
	s, trailer := check(t, c)
	require.Equal(t, codes.ResourceExhausted, s.Code())
	require.Equal(t, 333334*time.Microsecond, detail[*errdetails.RetryInfo](s).GetRetryDelay().AsDuration())
	require.Equal(t, []string{"334"}, trailer.Get("grpc-retry-pushback-ms"), "rounded up")
	require.Len(t, detail[*errdetails.QuotaFailure](s).GetViolations(), 1)
	require.Equal(t, "policy:api", detail[*errdetails.QuotaFailure](s).GetViolations()[0].GetSubject())
	require.Equal(t, "RATE_LIMITED", detail[*errdetails.ErrorInfo](s).GetReason())
	require.Equal(t, map[string]string{"policy": "api"}, detail[*errdetails.ErrorInfo](s).GetMetadata())
	require.NotContains(t, s.Proto().String(), secret)
}

func TestUnary_SeveralChargesAreAllOrNothing(t *testing.T) {
	t.Parallel()
	fake := newFake(t)
	c := serve(t, grpclimit.New(fake, per("api", "budget"), grpclimit.Closed(time.Minute)))
	s, _ := check(t, c)
	require.Equal(t, codes.OK, s.Code())

	s, trailer := check(t, c)
	require.Equal(t, codes.ResourceExhausted, s.Code())
	require.Nil(t, detail[*errdetails.RetryInfo](s), "no wait would help")
	require.Equal(t, []string{"-1"}, trailer.Get("grpc-retry-pushback-ms"))
	require.Equal(t, "budget", detail[*errdetails.ErrorInfo](s).GetMetadata()["policy"], "the one that refused")
	d, err := fake.Peek(t.Context(), "api", secret)
	require.NoError(t, err)
	require.EqualValues(t, 1, d.Remaining, "nothing was taken from the other")
}

func TestStream_IsChargedOnce(t *testing.T) {
	t.Parallel()
	c := serve(t, grpclimit.New(newFake(t), func(_ context.Context, method string) []client.Charge {
		if !strings.HasSuffix(method, "/Watch") {
			return nil
		}
		return []client.Charge{{Policy: "budget", Key: secret}}
	}, grpclimit.Closed(time.Minute)))
	watch := func() error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := c.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
		require.NoError(t, err)
		_, err = stream.Recv()
		return err
	}
	require.NoError(t, watch())
	require.Equal(t, codes.ResourceExhausted, status.Code(watch()))
	for range 3 {
		s, _ := check(t, c)
		require.Equal(t, codes.OK, s.Code(), "calls without charges pass")
	}
}

// Each row of the table, before the first decision and after it. It replaces the program's logger, so it is not parallel.
func TestFailures_AsTheTableOfErrorsSays(t *testing.T) {
	handler := func(context.Context, any) (any, error) { return nil, nil }
	for name, test := range map[string]struct {
		failure grpclimit.Failure
		away    codes.Code
		passed  map[string]int64
	}{
		"open":   {grpclimit.Open(time.Minute), codes.OK, map[string]int64{"api": 2}},
		"closed": {grpclimit.Closed(time.Minute), codes.Unavailable, map[string]int64{"api": 0}},
	} {
		for _, row := range failuretest.Read(t) {
			for _, hasDecided := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, %t", row.Error, name, hasDecided), func(t *testing.T) {
					log, err := failuretest.Log(t), row.Err(t)
					synctest.Test(t, func(t *testing.T) {
						fake := newFake(t)
						limit := grpclimit.New(fake, per("api"), test.failure)
						ask := func() error {
							_, err := limit.Unary(t.Context(), nil, &grpc.UnaryServerInfo{}, handler)
							return err
						}
						if hasDecided {
							require.NoError(t, ask())
						}
						fake.FailAll(err)
						want, passed := test.away, test.passed
						if row.Fails(hasDecided) {
							want, passed = codes.Internal, map[string]int64{}
						}
						for range 2 {
							err := ask()
							require.Equal(t, want, status.Code(err))
							require.NotContains(t, status.Convert(err).Message(), row.Name)
						}
						row.RequireLog(t, log.String())
						require.Equal(t, passed["api"], limit.Passed()["api"])
						fake.FailNext(err) // an upgrade
						fake.FailAll(nil)
						if row.Kind == "setup" {
							require.NoError(t, ask())
						}
					})
				})
			}
		}
	}
}

// A silent limiter answers when its caller has no more time.
type silent struct{ client.Acquirer }

func (silent) Acquire(ctx context.Context, _, _ string, _ ...client.CallOption) (client.Decision, error) {
	<-ctx.Done()
	return client.Decision{}, ctx.Err()
}

func TestFailures_OpenIsNotForThoseWhoLeave(t *testing.T) {
	t.Parallel()
	limit := grpclimit.New(silent{}, per("api"), grpclimit.Open(time.Minute))
	ctx, leave := context.WithCancel(t.Context())
	leave()
	ran := false
	handler := func(context.Context, any) (any, error) { ran = true; return nil, nil }
	_, err := limit.Unary(ctx, nil, &grpc.UnaryServerInfo{}, handler)
	require.Equal(t, codes.Canceled, status.Code(err))
	require.False(t, ran)

	limit = grpclimit.New(silent{}, per("api"), grpclimit.Open(time.Millisecond))
	_, err = limit.Unary(t.Context(), nil, &grpc.UnaryServerInfo{}, handler)
	require.NoError(t, err, "the timeout is the limiter's")
	require.True(t, ran)
}

func TestNew_WantsAChoice(t *testing.T) {
	t.Parallel()
	require.Panics(t, func() { grpclimit.New(nil, per("api"), grpclimit.Open(time.Second)) })
	require.Panics(t, func() { grpclimit.New(newFake(t), nil, grpclimit.Open(time.Second)) })
	require.Panics(t, func() { grpclimit.New(newFake(t), per("api"), grpclimit.Failure{}) })
	require.Panics(t, func() { grpclimit.Closed(0) })
}
