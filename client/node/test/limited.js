// A program for each library that has a store. By itself: node limited.js <library> <limit> <window in ms> [own, for the library's own store].
import http from 'node:http'
import { fileURLToPath } from 'node:url'
import { NestStorage, PostgresStore, fastifyStore } from '../stores.js'
import { connect } from './kit.js'

/** Each makes a server that limits GET / with a store, or with the library's own if there is no database. */
export const programs = {
  async express(db, limit, windowMs, options) {
    const { default: express } = await import('express'), { rateLimit } = await import('express-rate-limit')
    const app = express()
    app.use(rateLimit({ windowMs, limit, ...(db && { store: new PostgresStore(db) }), standardHeaders: 'draft-7', ...options }))
    app.get('/', (_request, response) => response.send('hello'))
    app.use((error, _request, response, _next) => response.status(500).send(error.message))
    return http.createServer(app)
  },
  async hono(db, limit, windowMs, options) {
    const { Hono } = await import('hono'), { rateLimiter } = await import('hono-rate-limiter')
    const { createAdaptorServer } = await import('@hono/node-server')
    const app = new Hono()
    app.use(rateLimiter({ windowMs, limit, keyGenerator: () => 'of hono', ...(db && { store: new PostgresStore(db) }), ...options }))
    app.get('/', (c) => c.text('hello'))
    app.onError((error, c) => c.text(error.message, 500))
    return createAdaptorServer({ fetch: app.fetch })
  },
  async fastify(db, max, timeWindow, options) {
    const { default: fastify } = await import('fastify'), { default: rateLimit } = await import('@fastify/rate-limit')
    const app = fastify()
    await app.register(rateLimit, { max, timeWindow, ...(db && { store: fastifyStore(db, { prefix: 'fastify ' }) }), ...options })
    app.get('/', () => 'hello')
    app.get('/own', { config: { rateLimit: { max: 1, timeWindow } } }, () => 'hello')
    await app.ready()
    return app.server
  },
  async nest(db, limit, ttl) {
    await import('reflect-metadata')
    const { Controller, Get, Module } = await import('@nestjs/common'), { APP_GUARD, NestFactory } = await import('@nestjs/core')
    const { ThrottlerGuard, ThrottlerModule } = await import('@nestjs/throttler')
    class Hello { get() { return 'hello' } }
    Get('/')(Hello.prototype, 'get', Object.getOwnPropertyDescriptor(Hello.prototype, 'get'))
    Controller()(Hello)
    class App {}
    const throttler = ThrottlerModule.forRoot({ throttlers: [{ ttl, limit }], ...(db && { storage: new NestStorage(db) }) })
    Module({ imports: [throttler], controllers: [Hello], providers: [{ provide: APP_GUARD, useClass: ThrottlerGuard }] })(App)
    const app = await NestFactory.create(App, { logger: false })
    return (await app.init()).getHttpServer()
  },
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [, , library, limit, windowMs, own] = process.argv
  const server = await programs[library](own ? undefined : connect(), Number(limit), Number(windowMs))
  server.listen(0, '127.0.0.1', () => process.send(server.address().port))
}
