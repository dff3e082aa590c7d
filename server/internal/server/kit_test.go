package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/emptypb"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A testServer is a running server with a client of each kind. It stops when the test ends.
type testServer struct {
	*server.Server
	t    testing.TB
	conn *grpc.ClientConn
	rpc  pb.RateLimiterClient
	url  string
	http *http.Client
	log  *kit.Log

	stop func() error // once; later calls say what the first did
}

// newDB returns a database with the policies api (10 tokens, 1 a day), budget (a million, no refill) and jobs (10 slots, for a minute).
func newDB(t testing.TB) *pgtest.DB {
	db := pgtest.New(t)
	definePolicies(t, db)
	return db
}

// parallelDB is newDB for a test that runs beside others.
func parallelDB(t *testing.T) *pgtest.DB {
	t.Parallel()
	return newDB(t)
}

func definePolicies(t testing.TB, db *pgtest.DB) {
	db.Exec(t, `select ratelimit_define_policy('api', 10, 1, '1 day'); select ratelimit_define_policy('budget', 1000000, 0, '1 day');
		select ratelimit_define_policy('jobs', 10, lease => '1 minute')`)
}

// load reads settings, each NAME=value, over those that a test needs.
func load(t testing.TB, url string, settings ...string) config.Config {
	values := map[string]string{"DATABASE_URL": url, "GRPC_ADDR": "127.0.0.1:0", "HTTP_ADDR": "127.0.0.1:0",
		"CALL_TIMEOUT": "1m", "LOCK_TIMEOUT": "1m", "STOP_TIMEOUT": "1m"}
	for _, setting := range settings {
		name, value, _ := strings.Cut(setting, "=")
		values[name] = value
	}
	c, err := config.Load("", func(name string) (string, bool) {
		value, ok := values[name]
		return value, ok
	})
	require.NoError(t, err)
	return c
}

func start(t testing.TB, url string, settings ...string) *testServer {
	return startWith(t, load(t, url, settings...))
}

// parallel starts a server with a database of its own, for a test that runs beside others.
func parallel(t *testing.T, settings ...string) (*pgtest.DB, *testServer) {
	db := parallelDB(t)
	return db, start(t, db.URL, settings...)
}

func startWith(t testing.TB, c config.Config, options ...grpc.DialOption) *testServer {
	t.Helper()
	s := &testServer{t: t, log: new(kit.Log)}
	var err error
	s.Server = kit.NoError(server.Start(t.Context(), c, slog.New(slog.NewTextHandler(s.log, nil))))(t)
	s.stop = sync.OnceValue(s.Stop)
	s.conn, err = grpc.NewClient(s.GRPCAddr().String(), append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)...)
	require.NoError(t, err)
	s.rpc = pb.NewRateLimiterClient(s.conn)
	s.url = "http://" + s.HTTPAddr().String()
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	s.http = &http.Client{Transport: transport}
	t.Cleanup(func() {
		s.conn.Close()
		transport.CloseIdleConnections()
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

type answer struct {
	status int
	header http.Header
	text   string
	body   map[string]any // nil if it is no JSON
}

// do sends a body, with headers that are given as "Name: value".
func (s *testServer) do(ctx context.Context, method, path, body string, headers ...string) (answer, error) {
	r := kit.NoError(http.NewRequestWithContext(ctx, method, s.url+path, strings.NewReader(body)))(s.t)
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		r.Header.Set(name, value)
		if name == "Host" {
			r.Host = value
		}
	}
	response, err := s.http.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{status: response.StatusCode, header: response.Header, text: string(text)}
	if strings.Contains(a.header.Get("Content-Type"), "json") {
		require.NoError(s.t, json.Unmarshal(text, &a.body), "%s", text)
	}
	return a, nil
}

func (s *testServer) post(ctx context.Context, path, body string, headers ...string) (answer, error) {
	return s.do(ctx, http.MethodPost, path, body, headers...)
}

// mustDo, mustPost and get are for answers that there have to be.
func (s *testServer) mustDo(method, path, body string, headers ...string) answer {
	return kit.NoError(s.do(s.t.Context(), method, path, body, headers...))(s.t)
}

func (s *testServer) mustPost(path, body string, headers ...string) answer {
	return s.mustDo(http.MethodPost, path, body, headers...)
}

func (s *testServer) get(path string, headers ...string) answer {
	return s.mustDo(http.MethodGet, path, "", headers...)
}

var (
	grpcNames = strings.NewReplacer(`"key":`, `"logical_key":`, `"idempotency_key":`, `"request_id":`)
	seconds   = regexp.MustCompile(`"(max_wait|pause_for)":([-0-9.]+)`)
)

// asGRPC returns the method that has the name of a path of JSON, and the body as it takes it.
func asGRPC(path, body string) (protoreflect.MethodDescriptor, string) {
	service := pb.File_pgratelimit_v1_ratelimiter_proto.Services().Get(0)
	for i := range service.Methods().Len() {
		method := service.Methods().Get(i)
		if strings.EqualFold(string(method.Name()), strings.ReplaceAll(path, "_", "")) {
			return method, seconds.ReplaceAllString(grpcNames.Replace(body), `"$1":"${2}s"`)
		}
	}
	panic("no method is called " + path)
}

// call makes the call of a path of JSON by gRPC, with the same body.
func (s *testServer) call(ctx context.Context, path, body string) (proto.Message, error) {
	method, body := asGRPC(path, body)
	in := dynamicpb.NewMessage(method.Input())
	require.NoError(s.t, protojson.Unmarshal([]byte(body), in), body)
	answer := kit.NoError(protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName()))(s.t)
	out := answer.New().Interface()
	return out, s.conn.Invoke(ctx, "/"+string(method.Parent().FullName())+"/"+string(method.Name()), in, out)
}

func beside(do func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- do() }()
	return done
}

func (s *testServer) begin(ctx context.Context, path, body string) <-chan error {
	return beside(func() error { return kit.ErrorOf(s.call(ctx, path, body)) })
}

// beginPost makes a call by JSON beside the test. An answer that does not allow is an error.
func (s *testServer) beginPost(ctx context.Context, path, body string) <-chan error {
	return beside(func() error {
		a, err := s.post(ctx, path, body)
		if err == nil && a.body["allowed"] != true {
			err = errors.New(a.text)
		}
		return err
	})
}

func (s *testServer) acquire(policy, key string) *pb.Decision {
	return kit.NoError(s.rpc.Acquire(s.t.Context(), &pb.Request{Policy: policy, LogicalKey: key}))(s.t)
}

// take takes one token, by gRPC for callers of an even number and else by JSON. It may be called beside the test.
func (s *testServer) take(ctx context.Context, caller int, policy, key string) (allowed, estimated bool, err error) {
	if caller%2 == 0 {
		d, err := s.rpc.Acquire(ctx, &pb.Request{Policy: policy, LogicalKey: key})
		return d.GetVerdict() == pb.Verdict_ALLOWED, d.GetEstimated(), err
	}
	a, err := s.post(ctx, "/v1/acquire", fmt.Sprintf(`{"policy":%q,"key":%q}`, policy, key))
	if _, decided := a.body["allowed"]; err == nil && !decided {
		err = fmt.Errorf("%d: %s", a.status, a.text)
	}
	return a.body["allowed"] == true, a.body["estimated"] == true, err
}

func (s *testServer) remaining(policy, key string) int64 {
	return kit.NoError(s.rpc.Peek(s.t.Context(), &pb.Charge{Policy: policy, LogicalKey: key}))(s.t).GetRemaining()
}

func requireProblem(t testing.TB, a answer, status int, sqlState string) {
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	require.EqualValues(t, status, a.body["status"])
	require.NotEmpty(t, a.body["title"])
	if sqlState == "" {
		require.NotContains(t, a.body, "sqlstate")
	} else {
		require.Equal(t, sqlState, a.body["sqlstate"], a.body)
	}
}

// requireInfo checks what a gRPC error says for programs.
func requireInfo(t testing.TB, err error, reason, sqlState string) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			require.Equal(t, "pgratelimit", info.GetDomain())
			require.Equal(t, reason, info.GetReason())
			require.Equal(t, sqlState, info.GetMetadata()["sqlstate"])
			return
		}
	}
	require.Fail(t, "no ErrorInfo", "%v", err)
}

// taken is what buckets of budget have lost.
func taken(t testing.TB, db *pgtest.DB) int64 {
	return kit.One[int64](t, db.Pool, "select coalesce(sum(capacity - remaining), 0)::bigint from ratelimit_status('budget', 10000)")
}

// lock holds all policies until it is called: no call of a limiter ends meanwhile.
func lock(t testing.TB, db *pgtest.DB) (unlock func()) {
	return hold(t, db, "lock table ratelimit.policies in access exclusive mode")
}

// hold runs a statement, and holds its locks until it is called.
func hold(t testing.TB, db *pgtest.DB, sql string) (unlock func()) {
	conn := db.Connect(t)
	kit.Execute(t, conn, "begin; "+sql)
	return sync.OnceFunc(func() {
		require.NoError(t, kit.ErrorOf(conn.Exec(context.Background(), "rollback")))
	})
}

// awaitBlocked waits until so many calls of the server wait for a lock.
func awaitBlocked(t testing.TB, db *pgtest.DB, n int) {
	db.Await(t, 20*time.Second, `
		select count(*) = $1 from pg_stat_activity
		 where application_name = 'pgratelimit' and datname = current_database() and wait_event_type = 'Lock'`, n)
}

// newRole returns a database, a role that may call functions of it, and the connection string with its rights and none of our own.
func newRole(t testing.TB, functions string) (db *pgtest.DB, role, roleURL string) {
	role = kit.NewRole(t)
	db = newDB(t)
	if functions != "" {
		db.Exec(t, "grant execute on function "+functions+" to "+role)
	}
	return db, role, kit.WithSettings(db.URL, "role", role)
}

// newPrivateDB is parallelDB on a server of its own.
func newPrivateDB(t *testing.T) (*pgtest.DB, *pgtest.Server) {
	t.Parallel()
	db, postgres := kit.NewPrivateDB(t)
	definePolicies(t, db.DB)
	return db.DB, postgres
}

// dial connects to a listener until the test ends.
func dial(t testing.TB, address net.Addr) *net.TCPConn {
	conn := kit.NoError(net.Dial("tcp", address.String()))(t)
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn)
}

// methods are some of each service, of either kind.
var methods = []string{
	"/pgratelimit.v1.RateLimiter/Acquire", "/pgratelimit.v1.RateLimiter/AcquireStream",
	"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
	"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}

// invoke sends an empty message by a method of any kind, and returns the first error.
func invoke(ctx context.Context, s *testServer, method string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&emptypb.Empty{}); err != nil && !errors.Is(err, io.EOF) { // whose reason the next one tells
		return err
	}
	_ = stream.CloseSend() // likewise
	return stream.RecvMsg(&emptypb.Empty{})
}

// startError is why a server does not start.
func startError(t testing.TB, url string, settings ...string) error {
	s, err := server.Start(t.Context(), load(t, url, settings...), slog.New(slog.DiscardHandler))
	if s != nil {
		require.NoError(t, s.Stop())
	}
	require.Error(t, err)
	return err
}
