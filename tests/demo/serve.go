package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// serve shows the server, pgratelimit serve, with some policies and a little traffic, until ctx ends. The server and the
// database end with it.
func serve(ctx context.Context) (err error) {
	shown := false
	defer func() {
		if !shown && ctx.Err() != nil {
			err = nil // it was told to end before it began
		}
	}()
	fmt.Println("Looking for a PostgreSQL: RATELIMIT_DATABASE_URL, Docker, or one installed here ...")
	postgres, err := pgtest.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	url, err := database(ctx, postgres)
	if err != nil {
		return err
	}
	fmt.Printf("Found: PostgreSQL %s (%s).\n", postgres.Version, postgres.Rung)
	if err := prepare(ctx, postgres, url); err != nil {
		return err
	}

	s := served{database: url, http: address("HTTP_ADDR", "127.0.0.1:8080"), grpc: address("GRPC_ADDR", "127.0.0.1:8081")}
	stop, err := s.start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	shown = true
	s.explain(postgres)
	s.traffic(ctx)
	return nil
}

// The image has the package installed.
const beAnOwner = `
	do $$
	declare
	  v_owner text := (select nspowner::regrole from pg_namespace where nspname = 'ratelimit');
	begin
	  if v_owner is null then
	    create role demo;
	    grant create on database postgres to demo;
	    grant create on schema public to demo;
	    v_owner := 'demo';
	  end if;
	  execute 'grant pg_read_all_stats to ' || v_owner;
	  execute 'set role ' || v_owner;
	end
	$$`

// prepare installs the package and defines what the traffic is limited by.
func prepare(ctx context.Context, postgres *pgtest.Server, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if postgres.Rung != "url" { // a server of ours, whose superuser the doctor would complain of
		if _, err := conn.Exec(ctx, beAnOwner); err != nil {
			return err
		}
	}
	if err := migrations.Up(ctx, conn); err != nil {
		return err
	}
	fmt.Println("Installed pgratelimit. The policies:")
	d := demo{ctx: ctx, conn: conn}
	d.sql("select ratelimit_define_policy('api', capacity => 20, refill => 2, every => '1 second')")
	d.sql("select ratelimit_define_policy('signup', capacity => 3, refill => 1, every => '20 seconds')")
	d.sql("select ratelimit_define_policy('llm', capacity => 10000, refill => 10000, every => '1 hour')")
	return d.err
}

// address is where the server shall listen: what the environment says, else its default, else a port that is free.
func address(setting, usual string) string {
	if given, ok := os.LookupEnv(setting); ok {
		return given
	}
	for _, address := range []string{usual, "127.0.0.1:0"} {
		if listener, err := net.Listen("tcp", address); err == nil {
			defer listener.Close()
			return listener.Addr().String()
		}
	}
	return usual
}

// A served is a server that runs.
type served struct {
	database   string
	http, grpc string // addresses
}

// start returns when the server answers, and how to stop it. What it logs is kept until there is an error.
func (s served) start(ctx context.Context) (stop func() error, err error) {
	var log bytes.Buffer
	c := exec.Command("build/pgratelimit", "serve") // make serve-demo has built it
	c.Env = append(os.Environ(), "STATUS_PAGE=true", "DATABASE_URL="+s.database, "HTTP_ADDR="+s.http, "GRPC_ADDR="+s.grpc)
	c.Stderr = &log
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for this program, which tells it
	if err := c.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	stop = func() error {
		_ = c.Process.Signal(syscall.SIGTERM) // it may have ended
		if err := <-ended; err != nil {
			return fmt.Errorf("pgratelimit serve: %w\n%s", err, &log)
		}
		return nil
	}
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case err := <-ended:
			return nil, fmt.Errorf("pgratelimit serve: %w\n%s", err, &log)
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), stop())
		case <-ticker.C:
		}
		response, err := http.Get("http://" + s.http + "/healthz")
		if err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusOK {
			return stop, nil
		}
	}
}

// explain says what can be tried.
func (s served) explain(postgres *pgtest.Server) {
	grpcurl := "grpcurl"
	if _, err := exec.LookPath(grpcurl); err != nil {
		grpcurl = "go run github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4"
	}
	fmt.Printf(`
The server answers, and 40 users send it a little traffic.

  page     http://%[1]s/
  JSON     http://%[1]s/v1/acquire
  metrics  http://%[1]s/metrics
  health   http://%[1]s/healthz
  gRPC     %[2]s

Try it from another terminal, here:

  curl -s http://%[1]s/v1/acquire -d '{"policy": "api", "key": "user:42", "cost": 5}'
  curl -s http://%[1]s/v1/peek -d '{"policy": "api", "key": "user:1"}'
  curl -s http://%[1]s/v1/acquire_all -d '{"charges": [{"policy": "signup", "key": "::1"}, {"policy": "llm", "key": "org:1", "cost": 300}]}'
  curl -s http://%[1]s/metrics | grep ratelimit_requests_total
  %[3]s -plaintext -d '{"policy": "api", "logical_key": "user:42"}' %[2]s pgratelimit.v1.RateLimiter/Acquire
  build/pgratelimit doctor --database-url %[4]q
  build/pgratelimit status --max-rows 10 --database-url %[4]q
  psql %[4]q -c "select * from ratelimit_policies()"

`, s.http, s.grpc, grpcurl, s.database)
	if postgres.Rung == "url" {
		fmt.Printf("Ctrl-C ends the server. The database stays: psql %q -c 'drop database %s'\n", postgres.URL(""), ownDatabase)
		return
	}
	fmt.Println("Ctrl-C ends the server and its database.")
}

// traffic sends requests until ctx ends: a few users send most of them, and are denied sometimes.
func (s served) traffic(ctx context.Context) {
	zipf := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.5, 1, 39)
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	start, counts := time.Now(), map[string]int{}
	for n := 0; ctx.Err() == nil; n++ {
		user := zipf.Uint64() + 1
		call, body := "acquire", fmt.Sprintf(`{"policy": "api", "key": "user:%d", "cost": %d}`, user, 1+n%4)
		switch n % 10 {
		case 3:
			body = fmt.Sprintf(`{"policy": "signup", "key": "192.0.2.%d"}`, user)
		case 7:
			call, body = "charge", fmt.Sprintf(`{"policy": "llm", "key": "org:%d", "cost": %d}`, 1+user%5, 100+n%400)
		}
		counts[s.ask(ctx, call, body)]++
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	fmt.Printf("\nIn %v: %d allowed, %d denied, %d without an answer.\n",
		time.Since(start).Round(time.Second), counts["allowed"], counts["denied"], counts["error"])
}

// ask returns allowed, denied or error, and nothing for a call that ctx has ended.
func (s served) ask(ctx context.Context, call, body string) string {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.http+"/v1/"+call, strings.NewReader(body))
	if err != nil {
		return "error"
	}
	var answer struct{ Allowed *bool }
	response, err := http.DefaultClient.Do(request)
	if err == nil {
		err = json.NewDecoder(response.Body).Decode(&answer)
		response.Body.Close()
	}
	switch {
	case ctx.Err() != nil:
		return ""
	case err != nil || answer.Allowed == nil:
		return "error"
	case *answer.Allowed:
		return "allowed"
	}
	return "denied"
}
